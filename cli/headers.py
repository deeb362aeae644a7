"""Header blocks of HTTP/2 (RFC 7541, HPACK) as far as the load generator needs them. Pure.

Written: every field as a literal that nobody remembers. Read: everything but fields that the peer remembers from
earlier blocks, which it does not where a table of size 0 was asked for (SETTINGS_HEADER_TABLE_SIZE).
"""

from __future__ import annotations

from collections.abc import Sequence

Header = tuple[str, str]

_STATIC = """\
:authority|;:method|GET;:method|POST;:path|/;:path|/index.html;:scheme|http;:scheme|https;:status|200;:status|204;
:status|206;:status|304;:status|400;:status|404;:status|500;accept-charset|;accept-encoding|gzip, deflate;
accept-language|;accept-ranges|;accept|;access-control-allow-origin|;age|;allow|;authorization|;cache-control|;
content-disposition|;content-encoding|;content-language|;content-length|;content-location|;content-range|;
content-type|;cookie|;date|;etag|;expect|;expires|;from|;host|;if-match|;if-modified-since|;if-none-match|;if-range|;
if-unmodified-since|;last-modified|;link|;location|;max-forwards|;proxy-authenticate|;proxy-authorization|;range|;
referer|;refresh|;retry-after|;server|;set-cookie|;strict-transport-security|;transfer-encoding|;user-agent|;vary|;
via|;www-authenticate|"""
STATIC_TABLE: tuple[Header, ...] = tuple(
    (name, value) for name, _, value in (entry.partition("|") for entry in _STATIC.replace("\n", "").split(";"))
)
"""RFC 7541, appendix A; its indices count from 1"""

# RFC 7541, appendix B: bits of the code of each byte, and of the end. The code is canonical: codes of one length follow
# each other in the order of their bytes, so the lengths say it all.
_CODE_LENGTHS = (
    *(13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28),
    *(28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15),
    *(6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6),
    *(15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22),
    *(20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23),
    *(23, 24, 22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22),
    *(22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26),
    *(27, 24, 21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27),
    *(26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30),
)
_END = 256


class HeaderError(ValueError):
    """A header block that can't be read; the connection is of no more use."""


def encode(headers: Sequence[Header]) -> bytes:
    """A header block."""
    block = bytearray()
    for name, value in headers:
        block.append(0)  # a literal with a literal name, never to be remembered
        for text in (name, value):
            raw = text.encode("ascii")
            block += _integer(len(raw), 7) + raw
    return bytes(block)


def decode(block: bytes) -> list[Header]:
    """The fields of a header block, in order. Raises HeaderError."""
    headers: list[Header] = []
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _read_integer(block, at, 7)
                headers.append(_static(index))
            elif first & 0xE0 == 0x20:
                _, at = _read_integer(block, at, 5)  # the size of a table that isn't used
            else:
                index, at = _read_integer(block, at, 6 if first & 0x40 else 4)
                name, at = (_static(index)[0], at) if index else _read_text(block, at)
                value, at = _read_text(block, at)
                headers.append((name, value))
    except IndexError:
        raise HeaderError("a header block ends too early") from None
    return headers


def _static(index: int) -> Header:
    if not 0 < index <= len(STATIC_TABLE):
        raise HeaderError(f"a header refers to entry {index} of a table of {len(STATIC_TABLE)}")
    return STATIC_TABLE[index - 1]


def _integer(value: int, prefix_bits: int) -> bytes:
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes([value])
    out = bytearray([most])
    value -= most
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """The integer that begins in the low bits of block[at], and where the next thing begins."""
    most = (1 << prefix_bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        if shift > 28:
            raise HeaderError("an integer of a header block is too long")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _read_text(block: bytes, at: int) -> tuple[str, int]:
    coded = bool(block[at] & 0x80)
    length, at = _read_integer(block, at, 7)
    raw = block[at : at + length]
    if len(raw) < length:
        raise HeaderError("a header block ends too early")
    return (_uncode(raw) if coded else raw).decode("latin-1"), at + length


def _uncode(coded: bytes) -> bytes:
    """What Huffman's code spells; at most seven bits of the end's code may follow."""
    out = bytearray()
    code = length = 0
    for byte in coded:
        for bit in range(7, -1, -1):
            code = code << 1 | byte >> bit & 1
            length += 1
            symbol = _SYMBOLS.get((length, code))
            if symbol is not None:
                if symbol == _END:
                    raise HeaderError("a coded text contains the end")
                out.append(symbol)
                code = length = 0
    if length > 7 or code != (1 << length) - 1:
        raise HeaderError("a coded text ends within a code")
    return bytes(out)


def _symbols() -> dict[tuple[int, int], int]:
    """(bits, code) → byte, or the end."""
    found: dict[tuple[int, int], int] = {}
    code = last = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_CODE_LENGTHS)):
        code <<= length - last
        found[length, code] = symbol
        code, last = code + 1, length
    return found


_SYMBOLS = _symbols()
