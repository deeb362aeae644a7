"""Frames of HTTP/2 (RFC 9113), as the load generator writes and reads them. Pure.

length: 24 bits │ kind: 8 │ flags: 8 │ stream: 32 │ payload
"""

from __future__ import annotations

import enum
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
head = struct.Struct(">HBBBL")
"""high and low part of the length, kind, flags, stream"""


class Setting(enum.IntEnum):
    """What the two ends tell each other in SETTINGS."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame on the wire."""
    return head.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload
