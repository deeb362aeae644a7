"""The threads on which text is tokenised, so that the event loop and other clients' streams never wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Texts beyond this take their turn on one thread of their own, so that long prompts never delay short ones.
LONG_TEXT = 65_536


class TextWorkers:
    """A few threads for short texts and one for long ones."""

    def __init__(self, num_threads: int = 2) -> None:
        self._short = ThreadPoolExecutor(num_threads, "text")
        self._long = ThreadPoolExecutor(1, "long-text")

    async def run(self, size: int, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The call's result; `size`: characters or tokens of its input. A call that hasn't begun dies with its task."""
        pool = self._long if size > LONG_TEXT else self._short
        return await asyncio.wrap_future(pool.submit(call, *args, **kwargs))

    def close(self) -> None:
        """Start nothing more; what runs may end."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
