"""Every link between processes by way of this one, so that any of them can be cut or slowed.

    worker-0 ──▶ listener of scheduler-0 ──(queue, gate)──▶ scheduler-0
                 who called is found out from /proc

A cut link is a black hole: nothing crosses it, in either direction, not even that an end has closed; connections stay
open and new ones are taken and lead nowhere, until it is healed. A slowed one delivers each piece so much later. Both
are told by the names at its ends: `cut("worker-0")` cuts all links of that process, `cut("scheduler-0", "redis")` one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

Address = tuple[str, int]
_PIECE = 2**16
_MOST_PIECES = 1000


class Unreachable(Exception):
    """Whoever is called does not listen at the moment."""


@dataclass(eq=False)
class _Link:
    """One connection through the switchboard."""

    source: str
    destination: str
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.source, self.destination))


class Switchboard:
    """The listeners, their connections and what is wrong with them. Everything happens on the event loop."""

    def __init__(self, find_pids: Callable[[], dict[int, str]]) -> None:
        """`find_pids`: the processes that may call, by id, and their names."""
        self.held: Counter[str] = Counter()
        """pieces that a cut has held up or a slowed link has delayed, by the name that was cut or slowed"""
        self._find_pids = find_pids
        self._cuts: set[frozenset[str]] = set()
        self._slowed: dict[frozenset[str], float] = {}
        self._changed = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._links: set[_Link] = set()

    async def listen(self, destination: str, target: Callable[[], Address]) -> str:
        """HOST:PORT that leads to a process; `target` says where it is, or raises Unreachable."""

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(destination, target, reader, writer)

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return f"127.0.0.1:{port}"

    def cut(self, *names: str) -> None:
        """Nothing crosses any link of the one process named, or the link between the two."""
        self._cuts.add(frozenset(names))
        self._change()

    def slow(self, *names: str, delay_s: float) -> None:
        """Every piece on these links comes so much later."""
        self._slowed[frozenset(names)] = delay_s
        self._change()

    def heal(self, *names: str) -> None:
        """Undo both; without names: everything."""
        if names:
            self._cuts.discard(frozenset(names))
            self._slowed.pop(frozenset(names), None)
        else:
            self._cuts.clear()
            self._slowed.clear()
        self._change()

    async def close(self) -> None:
        """End every connection."""
        for server in self._servers:
            server.close()
        tasks = [task for link in self._links for task in link.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------ inside

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _cut_of(self, link: _Link) -> frozenset[str] | None:
        return next((names for names in self._cuts if names <= link.ends), None)

    def _delay_of(self, link: _Link) -> float:
        found = [(names, delay_s) for names, delay_s in self._slowed.items() if names <= link.ends]
        for names, _ in found:
            self.held[" ".join(sorted(names))] += 1
        return max((delay_s for _, delay_s in found), default=0.0)

    async def _passable(self, link: _Link) -> None:
        while (names := self._cut_of(link)) is not None:
            self.held[" ".join(sorted(names))] += 1
            await self._changed.wait()

    async def _connect(
        self,
        destination: str,
        target: Callable[[], Address],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        peer, own = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        link = _Link(_owner(peer[1], own[1], self._find_pids()), destination)
        self._links.add(link)
        try:
            task = asyncio.current_task()
            assert task is not None
            link.tasks.append(task)
            await self._passable(link)
            far_reader, far_writer = await asyncio.open_connection(*target())
            try:
                pumps = [
                    asyncio.create_task(self._pump(link, reader, far_writer)),
                    asyncio.create_task(self._pump(link, far_reader, writer)),
                ]
                link.tasks += pumps
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                far_writer.close()
        except (OSError, Unreachable, asyncio.CancelledError):
            pass
        finally:
            for pump in link.tasks[1:]:
                pump.cancel()
            writer.close()
            self._links.discard(link)

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its end has crossed."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_PIECES)
        clock = asyncio.get_running_loop().time

        async def take() -> None:
            while True:
                try:
                    piece = await reader.read(_PIECE)
                except OSError:
                    piece = b""
                await pieces.put((clock() + self._delay_of(link), piece))
                if not piece:
                    return

        taking = asyncio.create_task(take())
        try:
            while True:
                due, piece = await pieces.get()
                if (wait_s := due - clock()) > 0:
                    await asyncio.sleep(wait_s)
                await self._passable(link)
                if not piece:
                    return
                if writer.is_closing():
                    continue  # whoever was to have it is gone, which the other direction will tell
                with contextlib.suppress(OSError):
                    writer.write(piece)
                    await writer.drain()
        finally:
            taking.cancel()


def _owner(port: int, peer_port: int, pids: dict[int, str]) -> str:
    """The name of the process that holds the near end of a connection of the loopback; empty: none of these."""
    inode = _inode(port, peer_port)
    return next((name for pid, name in pids.items() if f"socket:[{inode}]" in sockets(pid)), "")


# sock_diag(7): struct nlmsghdr, inet_diag_req_v2 and inet_diag_msg; /proc/net/tcp would take the kernel 50 ms.
_SOCK_DIAG, _BY_FAMILY, _ONE, _ANY = 4, 20, 1, 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBBxI")
_WHICH = struct.Struct("!HH4s12x4s12x")
_REST = struct.Struct("=III")
_INODE_AT = _HEADER.size + 4 + 48 + 16


def _inode(port: int, peer_port: int) -> int:
    """Of the socket at 127.0.0.1:port that is connected to 127.0.0.1:peer_port; 0: there is none."""
    local = socket.inet_aton("127.0.0.1")
    which = _WHICH.pack(port, peer_port, local, local) + _REST.pack(0, _ANY, _ANY)
    asked = _ASKED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, _ANY) + which
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _ONE, 1, 0) + asked)
        answer = netlink.recv(4096)
    kind = _HEADER.unpack_from(answer)[1]
    return int(struct.unpack_from("=I", answer, _INODE_AT)[0]) if kind == _BY_FAMILY else 0


def sockets(pid: int) -> list[str]:
    """The open sockets of a process; none of one that has ended."""
    found = []
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    except OSError:
        return []
    return [one for one in found if one.startswith("socket:")]
