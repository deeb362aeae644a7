"""The planted faults; see run.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` (found exactly once) becomes `new`, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CORE = ("tests/scheduler",)
WORKER = ("tests/worker",)
GATEWAY = ("tests/gateway",)
NOISE = ("tests/engine/test_noise.py", "tests/engine/test_sampler.py", "tests/engine/test_portable.py")

# The C++ kernels are left out: each fault there would compile them anew. Plain torch stands for the contract.
ATTENTION = (
    "tests/engine/kernels/test_ops_attention.py::test_float64_says_the_same[torch-bf16-9x3x64]",
    "tests/engine/kernels/test_ops_attention.py::test_a_tokens_bits_are_its_own[torch-bf16-9x3x64]",
    "tests/engine/kernels/test_ops_attention.py::test_float64_says_the_same[torch-f32-4x4x80-everything]",
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "reservation-off-by-one",
        "scheduler/core/planner.py",
        "horizon = sequence.horizon + 1 + k\n",
        "horizon = sequence.horizon + k\n",
        CORE,
    ),
    Mutant(
        "in-flight-step-forgotten",
        "scheduler/core/applier.py",
        "sequence.horizon += count - reserved\n",
        "sequence.horizon = len(sequence.token_ids) + count\n",
        CORE,
    ),
    Mutant(
        "release-dropped",
        "scheduler/core/planner.py",
        "        step.released_slots.extend(worker.released_slots)\n",
        "",
        CORE,
    ),
    Mutant(
        "blocks-returned-too-early",
        "scheduler/core/scheduler.py",
        "        worker.leave(sequence)\n        sequence.move(State.LEAVING)\n        if sequence.in_flight == 0:\n",
        "        worker.leave(sequence)\n        sequence.move(State.LEAVING)\n        if sequence.in_flight < 2:\n",
        CORE,
    ),
    Mutant(
        "prefix-hit-covers-last-token",
        "scheduler/core/block_tables.py",
        "max_blocks = (len(sequence.token_ids) - 1) // pool.block_size",
        "max_blocks = len(sequence.token_ids) // pool.block_size",
        CORE,
    ),
    Mutant(
        "salt-ignored",
        "scheduler/core/prefix_cache.py",
        'f"{len(model)}:{model}{salt}"',
        'f"{len(model)}:{model}"',
        CORE,
    ),
    Mutant(
        "hash-of-uncomputed-block",
        "scheduler/core/applier.py",
        "sequence.computed = first + count - 1\n",
        "sequence.computed = first + count\n",
        CORE,
    ),
    Mutant(
        "tokens-of-cancelled-delivered",
        "scheduler/core/applier.py",
        "if state is State.RUNNING or state is State.LEAVING:",
        "if True:",
        CORE,
    ),
    Mutant(
        "old-epoch-accepted",
        "scheduler/loop.py",
        "(message.term, message.epoch) != (self.term, link.epoch)",
        "message.term != self.term",
        CORE,
    ),
    Mutant(
        "preempted-tokens-lost",
        "scheduler/core/applier.py",
        "                known += new\n",
        "                if state is State.RUNNING:\n                    known += new\n",
        CORE,
    ),
    Mutant(
        "eviction-keeps-the-name",
        "scheduler/core/block_pool.py",
        "                self.cache.forget(block)\n",
        "",
        CORE,
    ),
    Mutant(
        "newest-first-fairness",
        "scheduler/core/queue.py",
        "            level.clients.move_to_end(client)\n",
        "            level.clients.move_to_end(client, last=False)\n",
        CORE,
    ),
    Mutant(
        "rejected-draft-emitted",
        "worker/verification.py",
        "while accepted < num_draft and sampled[accepted] == draft[accepted]:",
        "while accepted < num_draft and sampled[accepted] != -1:",
        WORKER,
    ),
    Mutant(
        "bonus-dropped",
        "worker/verification.py",
        "    emitted = accepted + 1\n",
        "    emitted = max(1, accepted)\n",
        WORKER,
    ),
    Mutant(
        "stop-inside-accepted-run-missed",
        "worker/verification.py",
        "if sampled[accepted] in stop_token_ids or accepted + 1 >= max_new_tokens:",
        "if accepted + 1 >= max_new_tokens:",
        WORKER,
    ),
    Mutant(
        "history-without-the-draft",
        "worker/executor.py",
        "rows.append(SampleRow(params, seed, first + j, tokens, num_prompt, draft[:j], counts))",
        "rows.append(SampleRow(params, seed, first + j, tokens, num_prompt, [], counts))",
        WORKER,
    ),
    Mutant(
        "noise-of-the-wrong-index",
        "worker/executor.py",
        "rows.append(SampleRow(params, seed, first + j, tokens",
        "rows.append(SampleRow(params, seed, first, tokens",
        WORKER,
    ),
    Mutant(
        "draft-beyond-capacity",
        "worker/executor.py",
        "limit = min(max_draft, capacity - known, ",
        "limit = min(max_draft, ",
        WORKER,
    ),
    Mutant(
        "stale-tail-used",
        "worker/tails.py",
        "if offset < 0 or tokens[tail.base :] != tail.token_ids[:offset]:",
        "if offset < 0:",
        WORKER,
    ),
    Mutant(
        "stale-step-executed",
        "worker/attachment.py",
        "if (step.term, step.epoch) != (self._term, self._epoch) or step.number <= self._issued:",
        "if step.number <= self._issued:",
        WORKER,
    ),
    Mutant(
        "slot-mapping-off-by-one",
        "worker/batching.py",
        "slot_mapping += positions % block_size",
        "slot_mapping += (positions + 1) % block_size",
        WORKER,
    ),
    Mutant(
        "repeated-token-forwarded",
        "gateway/streams.py",
        "        token_ids = news.token_ids[skipped:]\n",
        "        token_ids = news.token_ids\n",
        GATEWAY,
    ),
    Mutant(
        "gap-forwarded",
        "gateway/streams.py",
        "        if news.first_token_index > known:\n",
        "        if news.first_token_index > known + 1:\n",
        GATEWAY,
    ),
    Mutant(
        "min-tokens-ignored-by-stops",
        "gateway/streams.py",
        "        armed = len(self.tokens) >= self._stop.min_tokens\n",
        "        armed = True\n",
        GATEWAY,
    ),
    Mutant(
        "held-back-text-lost",
        "gateway/streams.py",
        "        self._text.append(self._matcher.flush())\n",
        "        self._matcher.flush()\n",
        GATEWAY,
    ),
    Mutant(
        "choices-share-a-seed",
        "engine/noise.py",
        "    return _mix64(_mix64(seed ^ CHOICE) + choice * GOLDEN)",
        "    return _mix64(_mix64(seed ^ CHOICE) + GOLDEN)",
        NOISE,
    ),
    Mutant(
        "noise-can-reach-one",
        "engine/noise.py",
        ".mul_(2.0**-32).clamp_(max=_BELOW_ONE)",
        ".mul_(2.0**-32)",
        NOISE,
    ),
    Mutant(
        "noise-ignores-the-index",
        "engine/noise.py",
        "(output_index + 1) * GOLDEN",
        "GOLDEN",
        NOISE,
    ),
    Mutant(
        "attention-sees-one-key-beyond",
        "engine/kernels/torch_attention.py",
        "hidden = distance < 0 if window is None",
        "hidden = distance < -1 if window is None",
        ATTENTION,
    ),
    Mutant(
        "window-one-key-too-wide",
        "engine/kernels/torch_attention.py",
        "(distance < 0) | (distance >= window)",
        "(distance < 0) | (distance > window)",
        ATTENTION,
    ),
    Mutant(
        "tiles-merged-without-their-weights",
        "engine/kernels/torch_attention.py",
        "total += weights[step] * sums[pieces]",
        "total += sums[pieces]",
        ATTENTION,
    ),
    Mutant(
        "functions-end-in-part-of-a-vector",
        "engine/kernels/torch_tiles.py",
        "_VECTOR = 64\n",
        "_VECTOR = 1\n",
        ("tests/engine/kernels/test_ops_rows.py::test_a_rows_bits_are_its_own[torch-activation-f32-silu]",),
    ),
    Mutant(
        "step-plans-share-their-memory",
        "engine/step_plan.py",
        "cycle((_Buffers(device), _Buffers(device)))",
        "cycle((_Buffers(device),))",
        ("tests/engine/test_step_plan.py",),
    ),
    Mutant(
        "step-plan-arrays-overlap",
        "engine/step_plan.py",
        "size += -(-array.size // self._align) * self._align",
        "size += array.size // self._align * self._align",
        ("tests/engine/test_step_plan.py",),
    ),
    Mutant(
        "likely-tokens-lose-their-noise",
        "engine/kernels/torch_choose.py",
        "_SLACK = 0.05",
        "_SLACK = -1.0",
        ("tests/engine/kernels/test_ops_choose.py::test_the_highest_sum[torch-1000-3.0]",),
    ),
    Mutant(
        "lease-taken-from-its-holder",
        "cluster/redis_state.py",
        "if held and string.match(held, '^%d+ (%S+) ') ~= ARGV[1] then return held end\n",
        "",
        ("tests/cluster/test_state_contract.py",),
    ),
    Mutant(
        "lapsed-lease-put-back-under-an-old-term",
        "cluster/redis_state.py",
        "if not held and stored <= tonumber(ARGV[2]) then",
        "if not held then",
        ("tests/cluster/test_state_contract.py",),
    ),
    Mutant(
        "term-not-above-what-was-seen",
        "cluster/state.py",
        "max(stored + 1, now_ms, highest_seen + 1)",
        "max(stored + 1, now_ms, highest_seen)",
        ("tests/cluster/test_state_contract.py",),
    ),
    Mutant(
        "standby-welcomes",
        "scheduler/servicer.py",
        "            self._leadership.require()\n        except errors.Unavailable as error:",
        "            pass\n        except errors.Unavailable as error:",
        ("tests/scheduler/test_leadership.py",),
    ),
    Mutant(
        "stale-leader-does-not-look",
        "scheduler/leadership.py",
        "            await self._ask()\n\n    async def watch",
        "            self._wake.set()\n\n    async def watch",
        ("tests/scheduler/test_leadership.py",),
    ),
    Mutant(
        "standby-faster-than-a-returning-leader",
        "scheduler/leadership.py",
        "elif held is None and asyncio.get_running_loop().time() < self._patient_until:",
        "elif False:",
        ("tests/scheduler/test_leadership.py",),
    ),
    Mutant(
        "old-leader-is-stayed-with",
        "cluster/leaders.py",
        "while (best := self.leader) is None or best[1] <= term:",
        "while (best := self.leader) is None or best[1] <= term + 10**6:",
        ("tests/cluster/test_leaders.py",),
    ),
    Mutant(
        "popular-prefix-buries-its-cell",
        "gateway/routing.py",
        "if cell.live < max(MIN_BOUND,",
        "if True or cell.live < max(MIN_BOUND,",
        ("tests/gateway/test_routing.py",),
    ),
    Mutant(
        "lost-cell-keeps-its-load",
        "gateway/cells.py",
        "                self._live[name] -= 1\n                self._table.renew(request)",
        "                self._table.renew(request)",
        ("tests/gateway/test_cells.py",),
    ),
)
