"""Whom the load generator calls: an address, and the connection to it while there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cli.connection import Connection, Status
from cluster.server import split_address


class Caller:
    """Calls one address over one connection, made when it is needed and made again when it is lost."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT."""
        self._address = address
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def call(
        self, path: str, request: bytes, on_message: Callable[[bytes], None], timeout_s: float | None = None
    ) -> Status:
        """One call of `path`; never raises for what the peer or the network does."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connected()
        except TimeoutError:
            return Status("DEADLINE_EXCEEDED", "no connection in time")
        except OSError as error:
            return Status("UNAVAILABLE", str(error))
        return await connection.call(path, request, on_message, timeout_s)

    def close(self) -> None:
        """Calls that run end as cancelled."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._connection is None or not self._connection.usable:
                host, port = split_address(self._address)
                loop = asyncio.get_running_loop()
                _, self._connection = await loop.create_connection(lambda: Connection(self._address), host, port)
            return self._connection
