"""The shared state in Redis: each operation is one script, so that compare and set are one step.

    tandem:{CLUSTER/CELL}:lease     "TERM SCHEDULER_ID ADDRESS", lives as long as the lease
    tandem:{CLUSTER/CELL}:term      the last term of the cell; outlives leases by a month
    tandem:{CLUSTER}:schedulers     hash: scheduler id → "EXPIRES_MS TERM CELL ADDRESS", by the server's clock

The braces keep the keys that one script touches in one slot of a Redis Cluster. Everything expires: a cluster that is
gone leaves nothing behind. Losing all of it (an emptied server) costs at most a change of leadership.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions

from cluster.state import Lease, SchedulerEntry, StateUnavailable

TIMEOUT_S = 1.0
TERM_TTL_S = 30 * 24 * 3600

# Terms stay below 2**48, so Lua's doubles hold them exactly; %.0f writes them without an exponent.
_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+ (%S+) ') ~= ARGV[1] then return held end
local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
local term = string.format('%.0f', math.max(stored + 1, tonumber(ARGV[3]), tonumber(ARGV[4]) + 1))
held = term .. ' ' .. ARGV[1] .. ' ' .. ARGV[2]
redis.call('SET', KEYS[1], held, 'PX', ARGV[5])
redis.call('SET', KEYS[2], term, 'EX', ARGV[6])
return held
"""
_RENEW = """
local held = redis.call('GET', KEYS[1])
local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
if not held and stored <= tonumber(ARGV[2]) then held = ARGV[1] end
if held == ARGV[1] then
  redis.call('SET', KEYS[1], held, 'PX', ARGV[3])
  redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[4])
end
return held
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# A key with entries lives a little longer than its last one; entries of schedulers that are gone go with any writing.
_REGISTER = (
    _NOW
    + """
local expires = string.format('%.0f', now + ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], expires .. ' ' .. ARGV[2])
local entries = redis.call('HGETALL', KEYS[1])
local last = now
for index = 1, #entries, 2 do
  local until_ms = tonumber(string.match(entries[index + 1], '^%d+'))
  if until_ms <= now then redis.call('HDEL', KEYS[1], entries[index]) end
  last = math.max(last, until_ms)
end
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', last + 1000))
"""
)
_SCHEDULERS = (
    _NOW
    + """
local entries, live = redis.call('HGETALL', KEYS[1]), {}
for index = 1, #entries, 2 do
  if tonumber(string.match(entries[index + 1], '^%d+')) > now then
    live[#live + 1] = entries[index]
    live[#live + 1] = entries[index + 1]
  end
end
return live
"""
)


class RedisState:
    """The state of one cluster in one Redis; the event loop's."""

    def __init__(self, url: str, cluster: str, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s` bounds each wait for the server; a server that stands still is as good as none."""
        self._cluster = cluster
        self._redis = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # Once more, at once: a connection may have ended while it was idle. Every script may run twice.
            retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 1),
        )
        register = self._redis.register_script
        self._acquire, self._renew, self._release = register(_ACQUIRE), register(_RENEW), register(_RELEASE)
        self._register, self._schedulers = register(_REGISTER), register(_SCHEDULERS)
        self._entries_key = f"tandem:{{{cluster}}}:schedulers"

    async def acquire(
        self, cell: str, scheduler_id: str, address: str, *, ttl_s: float, highest_seen: int, now_ms: int
    ) -> Lease:
        arguments: list[str | int] = [scheduler_id, address, now_ms, highest_seen, _ms(ttl_s), TERM_TTL_S]
        return _lease(cell, await _reached(self._acquire(self._keys(cell), [*arguments])))

    async def renew(self, lease: Lease, *, ttl_s: float) -> Lease | None:
        arguments: list[str | int] = [_spell(lease), lease.term, _ms(ttl_s), TERM_TTL_S]
        held = await _reached(self._renew(self._keys(lease.cell), [*arguments]))
        return None if held is None else _lease(lease.cell, held)

    async def release(self, lease: Lease) -> None:
        await _reached(self._release(self._keys(lease.cell)[:1], [_spell(lease)]))

    async def leader(self, cell: str) -> Lease | None:
        held = await _reached(self._redis.get(self._keys(cell)[0]))
        return None if held is None else _lease(cell, held)

    async def register(self, entry: SchedulerEntry, *, ttl_s: float) -> None:
        text = f"{entry.term} {entry.cell} {entry.address}"
        await _reached(self._register([self._entries_key], [entry.scheduler_id, text, _ms(ttl_s)]))

    async def withdraw(self, scheduler_id: str) -> None:
        await _reached(cast("Awaitable[Any]", self._redis.hdel(self._entries_key, scheduler_id)))

    async def schedulers(self) -> list[SchedulerEntry]:
        found = await _reached(self._schedulers([self._entries_key], []))
        entries = []
        for scheduler_id, text in zip(found[::2], found[1::2], strict=True):
            _, term, cell, address = _words(text, 4)
            entries.append(SchedulerEntry(scheduler_id, address, cell, int(term)))
        return sorted(entries, key=lambda one: (one.cell, one.scheduler_id))

    async def close(self) -> None:
        await self._redis.aclose()

    def _keys(self, cell: str) -> list[str]:
        """Of the lease and of the term."""
        base = f"tandem:{{{self._cluster}/{cell}}}"
        return [f"{base}:lease", f"{base}:term"]


async def _reached(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except (redis.exceptions.RedisError, OSError) as error:
        raise StateUnavailable(f"Redis: {error or type(error).__name__}") from error


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _spell(lease: Lease) -> str:
    return f"{lease.term} {lease.scheduler_id} {lease.address}"


def _lease(cell: str, text: str) -> Lease:
    term, scheduler_id, address = _words(text, 3)
    return Lease(cell, scheduler_id, address, int(term))


def _words(text: str, count: int) -> list[str]:
    words = str(text).split(" ")
    if len(words) != count or not words[0].isdecimal():
        raise StateUnavailable(f"Redis holds something else under our keys: {text[:80]!r}")
    return words
