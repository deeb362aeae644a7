"""Errors: the round trip, what may leave the process, and what arrives over a real connection."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from cluster import errors
from cluster.channel import connect
from cluster.server import bind, create_server

texts = st.text(max_size=800)
keys = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True).filter(lambda key: key not in ("field", "self", "reason"))
metadata = st.dictionaries(keys, st.one_of(texts, st.integers(), st.floats()), max_size=30)
reasons = st.from_regex(r"[A-Z][A-Z0-9_]{0,40}[A-Z0-9]", fullmatch=True)
delays = st.floats(min_value=0, max_value=1e7)

ERRORS = st.one_of(
    st.builds(
        lambda f, d, r, m: errors.InvalidField(f, d, reason=r, **_unclashing(m, "description")),
        texts,
        texts,
        reasons,
        metadata,
    ),
    st.builds(errors.NotFound, texts, texts),
    st.builds(errors.AlreadyExists, texts, texts),
    st.builds(
        lambda t, s, r, m: errors.QueueFull(t, s, reason=r, **_unclashing(m, "message", "retry_after_s")),
        texts,
        delays,
        reasons,
        metadata,
    ),
    st.builds(
        lambda t, s, r, m: errors.Unavailable(t, s, reason=r, **_unclashing(m, "message", "retry_after_s")),
        texts,
        delays,
        reasons,
        metadata,
    ),
    st.builds(errors.DeadlineExceeded, texts),
    st.builds(errors.Cancelled, texts),
    st.builds(errors.Unimplemented, texts),
    st.builds(errors.Internal, texts),
    st.builds(
        errors.TandemError,
        st.sampled_from(
            [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.DATA_LOSS]
        ),
        reasons,
        texts,
        metadata,
    ),
)


def _unclashing(values: dict[str, object], *names: str) -> dict[str, object]:
    return {key: value for key, value in values.items() if key not in names}


def _attributes(error: errors.TandemError) -> dict[str, object]:
    return {name: value for name, value in vars(error).items() if not name.startswith("_")}


@given(ERRORS)
def test_round_trip(error: errors.TandemError) -> None:
    status = errors.to_status(error)
    back = errors.from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert type(back) is type(error)
    assert _attributes(back) == _attributes(error)
    assert str(back) == error.message
    assert errors.to_status(back) == status


@given(ERRORS)
def test_status_obeys_the_rules_of_aip_193(error: errors.TandemError) -> None:
    status = errors.to_status(error)
    kinds = [detail.type_url for detail in status.details]
    assert len(kinds) == len(set(kinds)), "each detail type at most once"
    infos = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert info.domain == "tandem"
    assert info.reason == error.reason
    assert len(info.reason) <= 63
    # The trailer travels in base64, the message once more, percent-encoded; together under the 8 KiB that peers take.
    assert len(status.SerializeToString()) * 4 / 3 + 3 * len(status.message.encode()) < 7500


def test_the_table_of_codes_and_details() -> None:
    cases = [
        (errors.InvalidField("stop.strings[0]", "is empty"), "INVALID_ARGUMENT", "BadRequest"),
        (errors.NotFound("model", "gpt-9"), "NOT_FOUND", "ResourceInfo"),
        (errors.AlreadyExists("request", "r1"), "ALREADY_EXISTS", "ResourceInfo"),
        (errors.QueueFull("1024 requests wait", 2.5), "RESOURCE_EXHAUSTED", "RetryInfo"),
        (errors.Unavailable("draining"), "UNAVAILABLE", "RetryInfo"),
        (errors.DeadlineExceeded(), "DEADLINE_EXCEEDED", None),
        (errors.Cancelled(), "CANCELLED", None),
        (errors.Unimplemented("no grammars"), "UNIMPLEMENTED", None),
        (errors.Internal(), "INTERNAL", None),
    ]
    for error, code, detail in cases:
        names = [packed.TypeName() for packed in errors.to_status(error).details]
        assert error.code.name == code
        assert names == ["google.rpc.ErrorInfo", *([f"google.rpc.{detail}"] if detail else [])]
    assert errors.NotFound("model", "gpt-9").reason == "MODEL_NOT_FOUND"
    assert errors.NotFound("model", "gpt-9").message == "model 'gpt-9' does not exist"
    assert errors.InvalidField("n", "must be at least 1").message == "n: must be at least 1"


def test_a_long_value_is_cut_with_an_ellipsis_and_never_inside_a_character() -> None:
    error = errors.InvalidField("text", "🦊" * 1000, token="好" * 500)
    assert error.message.endswith("…")
    assert len(error.message.encode()) <= errors.MAX_MESSAGE_BYTES
    assert error.metadata["token"].endswith("…")
    assert "�" not in error.message + error.metadata["token"]
    assert errors.shorten("abc", 3) == "abc"
    assert errors.shorten("abcd", 3) == "…"
    assert errors.Internal("lone surrogate \ud800").message == "lone surrogate ?"


def test_a_reason_that_is_not_upper_snake_is_refused() -> None:
    for reason in ("lower", "A", "", "A-B", "A" * 64, "_A"):
        with pytest.raises(ValueError, match="UPPER_SNAKE"):
            errors.TandemError(grpc.StatusCode.INTERNAL, reason, "x")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("secret prompt"), "INTERNAL"),
        (KeyError("secret prompt"), "INTERNAL"),
        (TimeoutError("secret prompt"), "DEADLINE_EXCEEDED"),
        (asyncio.CancelledError("secret prompt"), "CANCELLED"),
    ],
)
def test_other_exceptions_never_speak_for_themselves(error: BaseException, code: str) -> None:
    status = errors.to_status(error)
    assert status.code == grpc.StatusCode[code].value[0]
    assert b"secret" not in status.SerializeToString()


def test_foreign_statuses() -> None:
    exhausted = errors.from_status(status_pb2.Status(code=8, message="Received message larger than max"))
    assert type(exhausted) is errors.TandemError, "the library's own RESOURCE_EXHAUSTED is not a full queue"
    assert exhausted.reason == "RESOURCE_EXHAUSTED"
    unavailable = errors.from_status(status_pb2.Status(code=14, message="connection refused"))
    assert isinstance(unavailable, errors.Unavailable)
    assert unavailable.retry_after_s == 1.0
    assert errors.from_status(status_pb2.Status(code=12345)).code is grpc.StatusCode.UNKNOWN
    broken = errors.to_status(errors.InvalidField("n", "bad"))
    for detail in broken.details:
        detail.value = b"\xff\xff\xff"
    assert errors.from_status(broken).code is grpc.StatusCode.INVALID_ARGUMENT


class _Raiser(grpc.GenericRpcHandler):
    """A service whose one method fails as the test wants."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def fail(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            context.set_trailing_metadata((("x-request-id", "r7"),))
            try:
                raise self._error
            except Exception as error:
                await errors.abort(context, error)

        return grpc.unary_unary_rpc_method_handler(fail)


async def _call_failing(error: BaseException) -> grpc.aio.AioRpcError:
    server = create_server()
    server.add_generic_rpc_handlers((_Raiser(error),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t/M")(b"", timeout=10)
            return caught.value
    finally:
        await server.stop(0)


async def test_abort_and_from_rpc_error_over_a_connection() -> None:
    sent = errors.QueueFull("1024 requests wait", 2.5, max_waiting=1024)
    failure = await _call_failing(sent)
    assert _attributes(errors.from_rpc_error(failure)) == _attributes(sent)
    assert rpc_status.from_call(_SyncCall(failure)) == errors.to_status(sent), "the standard library reads it too"
    trailers = dict(failure.trailing_metadata())
    assert trailers["grpc-retry-pushback-ms"] == "2500"
    assert trailers["x-request-id"] == "r7", "trailers that were set before survive"


async def test_the_largest_error_arrives_whole() -> None:
    values = {f"value_{i}": "\n" * 1000 for i in range(100)}
    sent = errors.InvalidField("field\n" * 1000, "\n" * 1000, reason="A" * 63, **values)
    failure = await _call_failing(sent)
    assert _attributes(errors.from_rpc_error(failure)) == _attributes(sent)


async def test_an_unknown_exception_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    failure = await _call_failing(RuntimeError("weights at /secret/path"))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "/secret" not in str(failure)
    assert "weights at /secret/path" in caplog.text


async def test_the_error_of_another_service_is_passed_on() -> None:
    inner = await _call_failing(errors.NotFound("model", "m"))
    outer = await _call_failing(inner)
    assert isinstance(errors.from_rpc_error(outer), errors.NotFound)
    bare = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="ipv4:10.0.0.1:50052 refused"
    )
    status = errors.to_status(bare)
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert "10.0.0.1" not in status.message


async def test_cancellation_is_never_converted() -> None:
    with pytest.raises(asyncio.CancelledError):
        await errors.abort(None, asyncio.CancelledError())  # type: ignore[arg-type]


async def test_a_status_that_comes_too_late_for_its_client_is_no_error_of_ours() -> None:
    """A client's deadline passes here and there at the same moment."""

    class Over:
        def trailing_metadata(self) -> None:
            return None

        async def abort_with_status(self, status: grpc.Status) -> NoReturn:
            raise grpc.aio.InternalError("Failed grpc_call_start_batch: the call is over")

    with pytest.raises(asyncio.CancelledError):
        await errors.abort(Over(), errors.DeadlineExceeded("the client's deadline passed"))


class _Flood(grpc.GenericRpcHandler):
    """Writes more than a connection takes, until its client is gone."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def flood(request: bytes, context: grpc.aio.ServicerContext) -> None:
            try:
                while True:
                    await context.write(bytes(2**18))
            except Exception as error:
                await errors.abort(context, error)

        return grpc.unary_stream_rpc_method_handler(flood)


async def test_a_client_that_leaves_in_the_middle_of_a_message_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = create_server()
    server.add_generic_rpc_handlers((_Flood(),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    for _ in range(20):
        async with connect(f"127.0.0.1:{port}") as channel:
            calls = [channel.unary_stream("/t/M")(b"") for _ in range(20)]
            await asyncio.gather(*(call.initial_metadata() for call in calls))
            for call in calls:
                call.cancel()
    await server.stop(0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class _SyncCall:
    """What rpc_status.from_call needs."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details, self.trailing_metadata = error.code, error.details, error.trailing_metadata
