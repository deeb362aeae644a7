"""Calls a Tandem cluster with `tandem_client`: python examples/python/typed_client.py [HOST:PORT …]

Several addresses are gateways of one cluster: when one of them dies, a stream goes on at another, with no gap and no
repeated token.
"""

from __future__ import annotations

import sys

from cluster.errors import DeadlineExceeded, InvalidField
from tandem_client import Message, SyncTandemClient


def unary(client: SyncTandemClient) -> None:
    """The whole answer at once. The same seed always gives the same answer."""
    answer = client.generate("Once upon a time", max_tokens=32, temperature=0.7, seed=1, ignore_eos=True, timeout_s=60)
    print("unary:", repr(answer.text))


def chat(client: SyncTandemClient) -> None:
    """A conversation, rendered with the model's own template; text as it comes."""
    print("chat: ", end="")
    for chunk in client.stream([Message("user", "Why is the sky blue?")], max_tokens=32, temperature=0, timeout_s=60):
        print(chunk.text, end="", flush=True)
        if chunk.usage is not None:
            usage = chunk.usage
            print(f"\nusage: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens")


def deadline(client: SyncTandemClient) -> None:
    """No more than so many seconds, the waiting included. What came until then is yours."""
    num_tokens = 0
    try:
        for chunk in client.stream("A very long story:", ignore_eos=True, timeout_s=1):
            num_tokens += sum(len(delta.token_ids) for delta in chunk.deltas)
    except DeadlineExceeded as error:
        print(f"deadline: {error.code.name} after {'some' if num_tokens else 'no'} tokens")


def cancel(client: SyncTandemClient) -> None:
    """Leaving the loop and closing the iterator cancels the request; its memory in the cluster is free at once."""
    chunks = client.stream("A very long story:", ignore_eos=True)
    num_tokens = 0
    for chunk in chunks:
        num_tokens += sum(len(delta.token_ids) for delta in chunk.deltas)
        if num_tokens >= 5:
            break
    chunks.close()
    print("cancelled after 5 tokens or a few more")


def wrong_field(client: SyncTandemClient) -> None:
    """Errors are classes, with a reason for programs and the name of the field."""
    try:
        client.generate("Once upon a time", temperature=-1)
    except InvalidField as error:
        print(f"error: {error.code.name} {error.reason} {error.field}: {error.description}")


def main(targets: list[str]) -> None:
    with SyncTandemClient(*targets) as client:
        unary(client)
        chat(client)
        deadline(client)
        cancel(client)
        wrong_field(client)


if __name__ == "__main__":
    main(sys.argv[1:])
