"""A process for the tests beside it: `echo` serves a bidi echo and prints its port, `hold PORT` keeps a stream open."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc

from cluster.channel import connect
from cluster.server import add_health, bind, create_server, run_until_signal

ECHO = "/test.Echo/Echo"


class Echo(grpc.GenericRpcHandler):
    """Answers each message with itself; `ended` is set when a stream ends for whatever reason."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._echo) if details.method == ECHO else None

    async def _echo(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            async for message in requests:
                yield message
        finally:
            self.ended.set()


async def serve_echo() -> None:
    server = create_server()
    server.add_generic_rpc_handlers((Echo(),))
    health = add_health(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    health.set("", True)

    async def drain() -> None:
        print("draining", flush=True)
        if "--never" in sys.argv:
            await asyncio.Event().wait()

    await run_until_signal(server, drain, health=health, ready=str(port))
    print("closed", flush=True)


async def hold_stream(port: int) -> None:
    async with connect(f"127.0.0.1:{port}") as channel:
        stream = channel.stream_stream(ECHO)()
        await stream.write(b"x")
        await stream.read()
        print("open", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_echo() if sys.argv[1] == "echo" else hold_stream(int(sys.argv[2])))
