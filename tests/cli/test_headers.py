"""Header blocks, against the examples of RFC 7541."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import headers
from cli.headers import HeaderError


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        ("82", [(":method", "GET")]),  # C.2.4
        ("040c2f73616d706c652f70617468", [(":path", "/sample/path")]),  # C.2.2
        ("100870617373776f726406736563726574", [("password", "secret")]),  # C.2.3
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [("custom-key", "custom-header")]),  # C.2.1
        (
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",  # C.4.1
            [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")],
        ),
        (
            "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
            [  # C.6.1
                (":status", "302"),
                ("cache-control", "private"),
                ("date", "Mon, 21 Oct 2013 20:13:21 GMT"),
                ("location", "https://www.example.com"),
            ],
        ),
        ("2088", [(":status", "200")]),  # a table of size 0 is announced first
    ],
)
def test_blocks_of_the_rfc(block: str, fields: list[headers.Header]) -> None:
    assert headers.decode(bytes.fromhex(block)) == fields


def test_the_code_leaves_no_gap() -> None:
    """Kraft's sum of a complete code is 1; one wrong length would show."""
    assert sum(Fraction(1, 2**length) for length in headers._CODE_LENGTHS) == 1
    assert len(headers._CODE_LENGTHS) == 257
    assert len(headers.STATIC_TABLE) == 61


@given(st.lists(st.tuples(st.text("abc-:", min_size=1), st.text(st.characters(max_codepoint=126), max_size=400))))
def test_what_is_written_can_be_read(fields: list[headers.Header]) -> None:
    assert headers.decode(headers.encode(fields)) == fields


@pytest.mark.parametrize(
    "block",
    [
        "be",  # an entry that the peer remembers and we don't
        "80",  # entry 0
        "0003616263",  # no value
        "00036162",  # a name that ends too early
        "1fffffffffffff7f",  # an endless integer
        "0001618161",  # a coded text that ends within a code
        "00016184ffffffff",  # a coded text with the end in it
    ],
)
def test_what_makes_no_sense_is_refused(block: str) -> None:
    with pytest.raises(HeaderError):
        headers.decode(bytes.fromhex(block))
