"""`tandem generate`: one request."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from cli.arguments import Subparsers, add_command, add_sampling, add_target, positive, sampling_options

if TYPE_CHECKING:
    from tandem_client.types import Prompt

_EXAMPLES = """\
examples:
  tandem generate --prompt "Once upon a time" --max-tokens 64 --temperature 0
  tandem generate --chat "What is a cell?" --system "Answer in one sentence." --stream
  tandem generate --token-ids 1,2,3 --max-tokens 8 --json
  tandem generate --prompt - --n 3 --seed 7 --json < prompt.txt
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "generate", run, "complete one prompt", _EXAMPLES)
    add_target(parser)
    prompt = parser.add_argument_group("what to continue (one of)")
    prompt.add_argument("--prompt", metavar="TEXT", help="text as it is; - reads stdin")
    prompt.add_argument(
        "--chat",
        nargs="?",
        const="",
        metavar="TEXT",
        help="a user's message, in the model's chat format; without TEXT: that of --prompt",
    )
    prompt.add_argument("--token-ids", metavar="IDS", help="token ids, with commas or spaces between")
    prompt.add_argument("--system", metavar="TEXT", help="a system message before --chat")
    add_sampling(parser)
    output = parser.add_argument_group("what to show")
    output.add_argument("--n", type=positive(int), metavar="N", help="choices to generate")
    output.add_argument("--logprobs", nargs="?", type=int, const=0, metavar="TOP", help="with TOP alternatives each")
    output.add_argument("--prompt-logprobs", type=int, metavar="TOP", help="the same for the prompt's tokens")
    output.add_argument("--echo", action="store_true", default=None, help="the prompt's text before the answer")
    output.add_argument("--stream", action="store_true", help="text as it comes; with --json one line a message")
    output.add_argument("--json", action="store_true", help="text, token_ids, finish_reason, usage, seed")
    output.add_argument("--request-id", default="", metavar="ID")
    output.add_argument("--priority", type=int, metavar="P", help="higher goes first")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    from cli.failures import UsageError

    if args.stream and not args.json and (args.n or 1) > 1:
        raise UsageError("--stream shows one choice; with --n use --json as well")
    return asyncio.run(_generate(args, prompt_of(args)))


def prompt_of(args: argparse.Namespace) -> Prompt:
    """The prompt that the flags describe. Raises UsageError."""
    from cli.failures import UsageError
    from tandem_client import Message

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.chat is not None:
        if args.token_ids is not None or (args.chat and prompt is not None):
            raise UsageError("give one of --prompt, --chat and --token-ids")
        system = [Message("system", args.system)] if args.system is not None else []
        return [*system, Message("user", args.chat or prompt or "")]
    if args.system is not None:
        raise UsageError("--system goes with --chat")
    if (prompt is None) == (args.token_ids is None):
        raise UsageError("give one of --prompt, --chat and --token-ids")
    if prompt is not None:
        return str(prompt)
    try:
        token_ids = [int(part) for part in args.token_ids.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"--token-ids takes whole numbers, not {args.token_ids!r}") from None
    if any(not 0 <= token_id < 2**32 for token_id in token_ids):
        raise UsageError("--token-ids: an id is not negative and fits 32 bits")
    return token_ids


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """Everything of the request but the prompt."""
    return {
        **sampling_options(args),
        "model": args.model,
        "request_id": args.request_id,
        "n": args.n,
        "priority": args.priority,
        "echo": args.echo,
        "logprobs": True if args.logprobs is not None else None,
        "top_logprobs": args.logprobs or None,
        "prompt_logprobs": args.prompt_logprobs,
    }


async def _generate(args: argparse.Namespace, prompt: Prompt) -> int:
    from cli import session

    options = request_options(args)
    async with session.client(args) as client:
        if not args.stream:
            answer = await client.generate(prompt, **options)
            if args.json:
                print(json.dumps(session.answer_json(answer, args.n or 1), ensure_ascii=False))
            else:
                for choice in answer.choices:
                    print(choice.prompt_text + choice.text)
            return 0
        async for chunk in client.stream(prompt, **options):
            if args.json:
                print(json.dumps(session.chunk_json(chunk), ensure_ascii=False), flush=True)
            else:
                print("".join(delta.prompt_text + delta.text for delta in chunk.deltas), end="", flush=True)
        if not args.json:
            print()
    return 0
