"""`tandem batch`: a file of requests, a file of answers; may be stopped at any time and started again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cli.arguments import Subparsers, add_command, add_sampling, add_target, positive, sampling_options

if TYPE_CHECKING:
    from tandem_client import Request, TandemClient

_EXAMPLES = """\
examples:
  tandem batch questions.jsonl answers.jsonl --concurrency 32
  tandem batch questions.jsonl answers.jsonl --retry-errors     what failed before is asked again

Each line of IN is a JSON object: "prompt" (text), "token_ids" or "messages" ([{"role": …, "content": …}, …]), an "id"
(default: line-N), and any parameters under the names of the flags (max_tokens, temperature, seed, stop, n, …), which
win over the flags. Each line of OUT has the id and the answer as `tandem generate --json` gives it, or "error". Lines
are in the order of completion and safe on disk. Started again, ids that are in OUT are skipped. The exit status is 1 if
any request of this run failed.
"""

_PROMPTS = ("prompt", "token_ids", "messages")


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "batch", run, "answer a file of requests", _EXAMPLES)
    parser.add_argument("input", type=Path, metavar="IN.jsonl")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl")
    add_target(parser)
    parser.add_argument("--concurrency", type=positive(int), default=16, metavar="N", help="at a time (default 16)")
    parser.add_argument("--retry-errors", action="store_true", help="ask again what OUT says has failed")
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    with _output(args.output) as output:
        done = ids_done(output, retry_errors=args.retry_errors)
        items = list(read_requests(args.input, {**sampling_options(args), "model": args.model}, done))
        return asyncio.run(_Batch(args, output).run(items, len(done)))


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the input."""

    id: str
    request: Request


@contextlib.contextmanager
def _output(path: Path) -> Iterator[BinaryIO]:
    """OUT for appending, ours alone."""
    from cli.failures import UsageError

    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another run writes {path}") from None
        yield file


def ids_done(output: BinaryIO, *, retry_errors: bool) -> set[str]:
    """The ids that OUT holds; a last line that a crash has cut short is taken off the file."""
    from cli.failures import UsageError

    output.seek(0)
    done: set[str] = set()
    end = 0
    for number, line in enumerate(output, 1):
        if not line.endswith(b"\n"):
            output.truncate(end)
            break
        end += len(line)
        try:
            entry = json.loads(line)
            entry_id = entry["id"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"line {number} of the output is no answer of ours; name another file") from None
        if "error" in entry and retry_errors:
            done.discard(entry_id)
        else:
            done.add(entry_id)
    output.seek(0, os.SEEK_END)
    return done


def read_requests(path: Path, defaults: dict[str, Any], done: set[str]) -> Iterator[Item]:
    """The requests whose ids are not done. Raises UsageError with the line's number, before anything is sent."""
    from cli.failures import UsageError

    seen: dict[str, int] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = _item(json.loads(line), f"line-{number}", defaults)
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: {error}") from None
            if item.id in seen:
                raise UsageError(f"{path}, line {number}: id {item.id!r} is that of line {seen[item.id]}")
            seen[item.id] = number
            if item.id not in done:
                yield item


def _item(entry: Any, default_id: str, defaults: dict[str, Any]) -> Item:
    from tandem_client import Message, Request
    from tandem_client.convert import stream_request
    from tandem_client.types import Options

    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    fields = dict(entry)
    item_id = str(fields.pop("id", default_id))
    prompts = [fields.pop(name) for name in _PROMPTS if name in fields]
    if len(prompts) != 1:
        raise ValueError(f"needs one of {', '.join(_PROMPTS)}")
    unknown = sorted(set(fields) - set(Options.__annotations__))
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}")
    prompt = prompts[0]
    if "messages" in entry:
        try:
            prompt = [Message(message["role"], message["content"]) for message in prompt]
        except (TypeError, KeyError):
            raise ValueError("messages: each needs role and content") from None
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    request = Request(prompt=prompt, **{**defaults, **fields})
    try:
        stream_request(request, {}, 0)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return Item(item_id, request)


class _Batch:
    """One run: requests go out side by side, answers go to the disk one group at a time."""

    def __init__(self, args: argparse.Namespace, output: BinaryIO) -> None:
        self._args = args
        self._output = output
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._num_failed = 0

    async def run(self, items: list[Item], num_done: int) -> int:
        """Ask everything; the exit status."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from cli import session

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as bars:
            self._bars = bars
            self._task = bars.add_task("requests", total=num_done + len(items), completed=num_done, note="")
            writing = asyncio.create_task(self._write())
            try:
                async with session.client(self._args) as client:
                    waiting = iter(items)
                    num_clients = min(self._args.concurrency, len(items))
                    await asyncio.gather(*(self._ask_all(client, waiting) for _ in range(num_clients)))
            finally:
                # Whatever was answered is written, even if we are told to stop.
                self._answers.put_nowait(None)
                await asyncio.shield(writing)
        return 1 if self._num_failed else 0

    async def _ask_all(self, client: TandemClient, waiting: Iterator[Item]) -> None:
        for item in waiting:
            self._answers.put_nowait(await self._ask(client, item))

    async def _ask(self, client: TandemClient, item: Item) -> dict[str, Any]:
        from cli import session
        from cluster.errors import InvalidField, TandemError

        try:
            answer = await client.generate(item.request)
        except TandemError as error:
            self._num_failed += 1
            told = {"code": error.code.name, "reason": error.reason, "message": error.message}
            if isinstance(error, InvalidField):
                told["field"] = error.field
            return {"id": item.id, "error": told}
        return {"id": item.id, **session.answer_json(answer, item.request.n or 1)}

    async def _write(self) -> None:
        """Append answers, all that wait at once, each group safe on disk before it counts."""
        ended = False
        while not ended:
            group = [await self._answers.get()]
            while not self._answers.empty():
                group.append(self._answers.get_nowait())
            ended = None in group
            lines = [json.dumps(answer, ensure_ascii=False) for answer in group if answer is not None]
            if lines:
                await asyncio.to_thread(self._append, "".join(line + "\n" for line in lines).encode())
                note = f"[red]{self._num_failed} failed[/red]" if self._num_failed else ""
                self._bars.update(self._task, advance=len(lines), note=note)

    def _append(self, data: bytes) -> None:
        self._output.write(data)
        self._output.flush()
        os.fsync(self._output.fileno())
