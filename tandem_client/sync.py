"""The client for programs without an event loop: the asynchronous one, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar, Unpack

from tandem_client.client import TandemClient
from tandem_client.retry import RetryPolicy
from tandem_client.types import Chunk, Generation, Model, Options, Prompt, Request

T = TypeVar("T")


class SyncTandemClient:
    """`TandemClient` with plain methods and iterators; may be used from several threads at once.

    with SyncTandemClient("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64).text)
    """

    def __init__(
        self,
        *targets: str,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._client = TandemClient(*targets, retry=retry, timeout_s=timeout_s, metadata=metadata)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> SyncTandemClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; safe to call twice."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self, prompt: Prompt | Request, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """As `TandemClient.generate`."""
        return self._wait(self._client.generate(prompt, timeout_s=timeout_s, **options))

    def stream(
        self, prompt: Prompt | Request, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Generator[Chunk, None, None]:
        """As `TandemClient.stream`. Closing the iterator, or an exception in the loop over it, cancels the request."""
        chunks = self._client.stream(prompt, timeout_s=timeout_s, **options)
        running: asyncio.Task[Any] | None = None

        async def next_chunk() -> Chunk | None:
            nonlocal running
            running = asyncio.current_task()
            return await anext(chunks, None)

        async def close() -> None:
            # Ctrl-C leaves the step that was awaited behind; a generator can't be closed while it runs.
            if running is not None and not running.done():
                running.cancel()
                await asyncio.wait({running})
            await chunks.aclose()

        try:
            while (chunk := self._wait(next_chunk())) is not None:
                yield chunk
        finally:
            self._wait(close())

    def tokenize(
        self,
        prompt: str | Sequence[Any],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """As `TandemClient.tokenize`."""
        return self._wait(
            self._client.tokenize(prompt, model=model, add_special_tokens=add_special_tokens, timeout_s=timeout_s)
        )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """As `TandemClient.detokenize`."""
        return self._wait(
            self._client.detokenize(
                token_ids, model=model, skip_special_tokens=skip_special_tokens, timeout_s=timeout_s
            )
        )

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """As `TandemClient.models`."""
        return self._wait(self._client.models(timeout_s=timeout_s))

    def model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """As `TandemClient.model`."""
        return self._wait(self._client.model(name, timeout_s=timeout_s))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C, say: the work must not go on behind the caller's back. No effect if the work itself failed.
            future.cancel()
            raise
