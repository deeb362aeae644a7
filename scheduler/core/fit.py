"""Whether a request could ever run, and how long an answer without max_tokens may become.

A worker holds `capacity` tokens of one sequence: its context, or its whole pool where that is smaller. Fit is asked
once, of the workers attached at that time. What was taken in is not refused later because workers have gone; it waits.
A request resumed here was taken in by an earlier leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler.core.model_pool import ModelPool
from scheduler.core.sequence import RequestSpec, Sequence, State
from scheduler.core.step import Refusal, RefusalKind
from scheduler.core.worker_state import WorkerSpec


def capacity_of(spec: WorkerSpec) -> int:
    """Most tokens of one sequence that a worker can hold."""
    return min(spec.max_model_len, spec.num_blocks * spec.block_size)


def check_spec(spec: RequestSpec) -> None:
    """Raise Refusal for a request that no worker could make sense of."""
    if not spec.prompt_token_ids:
        raise Refusal(RefusalKind.INVALID, "the prompt is empty", "prompt")
    indices = [index for index, _ in spec.choices]
    if not indices or len(set(indices)) != len(indices):
        raise Refusal(RefusalKind.INVALID, f"choices {indices} must be there, each once", "choices")
    if spec.max_tokens is None:
        return
    if spec.max_tokens < 1:
        raise Refusal(RefusalKind.INVALID, f"max_tokens must be at least 1, not {spec.max_tokens}", "stop.max_tokens")
    if any(len(emitted) >= spec.max_tokens for _, emitted in spec.choices):
        raise Refusal(RefusalKind.INVALID, "a choice has max_tokens tokens already", "resume")


def check_fit(spec: RequestSpec, workers: Iterable[WorkerSpec]) -> None:
    """Raise Refusal for what none of the workers (at least one) could hold, naming the bound that it breaks."""
    largest = max(workers, key=capacity_of)
    prompt = len(spec.prompt_token_ids)
    wanted = prompt + (1 if spec.max_tokens is None else spec.max_tokens)
    if wanted <= capacity_of(largest):
        return
    context = largest.max_model_len
    held = largest.num_blocks * largest.block_size
    if prompt >= context:
        message = f"the prompt has {prompt} tokens, the context holds {context}, one of them for output"
        raise Refusal(RefusalKind.INVALID, message, "prompt")
    if wanted > context:
        message = f"prompt ({prompt}) and max_tokens ({spec.max_tokens}) exceed the context of {context} tokens"
        raise Refusal(RefusalKind.INVALID, message, "stop.max_tokens")
    message = f"prompt and max_tokens need {wanted} tokens of KV memory, the largest worker holds {held}"
    raise Refusal(RefusalKind.INVALID, message, "prompt" if prompt >= held else "stop.max_tokens")


def clamped_limit(sequence: Sequence, workers: Iterable[WorkerSpec]) -> int | None:
    """The limit of a sequence without max_tokens; None where no worker could lengthen it.

    The least capacity that leaves room, so that any worker can take the sequence over.
    """
    known = len(sequence.token_ids)
    return min((capacity for capacity in map(capacity_of, workers) if capacity > known), default=None)


def stranded(pool: ModelPool, now: float) -> Iterator[Sequence]:
    """What waits though no worker that may take it is large enough; since when is noted at the first look."""
    largest_serving = max((capacity_of(worker.spec) for worker in pool.serving), default=0)
    largest_of_all = max((capacity_of(worker.spec) for worker in pool.workers.values()), default=0)
    for sequence in pool.waiting:
        if sequence.state is not State.WAITING:
            continue  # its request failed while the caller went through these
        largest = largest_of_all if sequence.request.started else largest_serving
        if (sequence.limit or len(sequence.token_ids) + 1) <= largest:
            sequence.stranded_since = None
        else:
            if sequence.stranded_since is None:
                sequence.stranded_since = now
            yield sequence
