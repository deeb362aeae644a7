"""The one place where exceptions become RPC status and status becomes an exception.

A `TandemError` is what a part of the cluster says went wrong. `to_status` turns any exception into a
`google.rpc.Status` with exactly one `ErrorInfo` (AIP-193: an UPPER_SNAKE reason, the domain, every dynamic value in its
metadata) and each other detail at most once; `from_status` is its inverse, for errors that travel as items of internal
streams and for clients. `abort` ends an RPC with it.

    bad field                    INVALID_ARGUMENT    BadRequest       InvalidField
    unknown model                NOT_FOUND           ResourceInfo     NotFound
    second live request id       ALREADY_EXISTS      ResourceInfo     AlreadyExists
    queue full                   RESOURCE_EXHAUSTED  RetryInfo        QueueFull
    draining, no worker          UNAVAILABLE         RetryInfo        Unavailable
    deadline, cancel             DEADLINE_EXCEEDED, CANCELLED         DeadlineExceeded, Cancelled
    option we lack / our bug     UNIMPLEMENTED / INTERNAL             Unimplemented, Internal

Errors travel in trailers, which peers cut off at 8 KiB in all, so every text here is bounded: long values are cut, with
an ellipsis in their place, and none can carry a prompt back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

logger = logging.getLogger(__name__)

DOMAIN = "tandem"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"

# Bytes of UTF-8. Their sum, in base64 and with the message once more percent-encoded, stays below 8 KiB.
MAX_MESSAGE_BYTES = 512
MAX_VALUE_BYTES = 192
MAX_METADATA_BYTES = 1536
MAX_RETRY_AFTER_S = 3600.0

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,61}[A-Z0-9]")


class TandemError(Exception):
    """Something went wrong that a caller should be told about.

    `message` is for people, `reason` (UPPER_SNAKE, at most 63 characters) and `metadata` for programs. Texts longer
    than the limits above are shortened here, so that the error and its status always say the same.
    """

    def __init__(
        self, code: grpc.StatusCode, reason: str, message: str, metadata: Mapping[str, object] | None = None
    ) -> None:
        if not _REASON.fullmatch(reason):
            raise ValueError(f"an error's reason is UPPER_SNAKE and at most 63 characters, not {reason!r}")
        self.code = code
        self.reason = reason
        self.message = shorten(message, MAX_MESSAGE_BYTES)
        self.metadata = _bounded_metadata(metadata or {})
        super().__init__(self.message)

    def details(self) -> list[Any]:
        """The google.rpc messages besides ErrorInfo."""
        return []


class InvalidField(TandemError):
    """A field of the request is wrong. `field` is its path in the request, for instance `sampling.temperature`."""

    def __init__(self, field: str, description: str, *, reason: str = "INVALID_FIELD", **metadata: object) -> None:
        self.field = shorten(field, MAX_VALUE_BYTES)
        self.description = shorten(description, MAX_MESSAGE_BYTES - MAX_VALUE_BYTES - 2)
        message = f"{self.field}: {self.description}"
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, reason, message, {"field": self.field, **metadata})

    def details(self) -> list[Any]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.description)
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class _ResourceError(TandemError):
    """An error about one named thing, for instance resource_type "model", resource_name "smollm2"."""

    def __init__(
        self, code: grpc.StatusCode, reason: str, verb: str, resource_type: str, name: str, message: str | None
    ) -> None:
        self.resource_type = shorten(resource_type, MAX_VALUE_BYTES)
        self.resource_name = shorten(name, MAX_VALUE_BYTES)
        text = message if message is not None else f"{self.resource_type} {self.resource_name!r} {verb}"
        super().__init__(code, reason, text, {self.resource_type: self.resource_name})

    def details(self) -> list[Any]:
        return [error_details_pb2.ResourceInfo(resource_type=self.resource_type, resource_name=self.resource_name)]


class NotFound(_ResourceError):
    """What the request names does not exist. Reason MODEL_NOT_FOUND for resource_type "model", and so on."""

    def __init__(self, resource_type: str, name: str, message: str | None = None) -> None:
        reason = f"{_upper_snake(resource_type)}_NOT_FOUND"
        super().__init__(grpc.StatusCode.NOT_FOUND, reason, "does not exist", resource_type, name, message)


class AlreadyExists(_ResourceError):
    """What the request would make exists. Reason REQUEST_ALREADY_EXISTS for resource_type "request", and so on."""

    def __init__(self, resource_type: str, name: str, message: str | None = None) -> None:
        reason = f"{_upper_snake(resource_type)}_ALREADY_EXISTS"
        super().__init__(grpc.StatusCode.ALREADY_EXISTS, reason, "already exists", resource_type, name, message)


class _RetryableError(TandemError):
    """An error after which trying again in `retry_after_s` seconds makes sense."""

    def __init__(
        self, code: grpc.StatusCode, reason: str, message: str, retry_after_s: float, metadata: Mapping[str, object]
    ) -> None:
        seconds = float(retry_after_s)
        if not math.isfinite(seconds):
            seconds = MAX_RETRY_AFTER_S
        # Whole milliseconds: what a Duration, a header and a client's clock all carry without loss.
        self.retry_after_s = round(min(max(seconds, 0.0), MAX_RETRY_AFTER_S) * 1000) / 1000
        super().__init__(code, reason, message, metadata)

    def details(self) -> list[Any]:
        delay = Duration()
        delay.FromMilliseconds(round(self.retry_after_s * 1000))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class QueueFull(_RetryableError):
    """No room now; gRPC clients do not retry this by themselves."""

    def __init__(self, message: str, retry_after_s: float, *, reason: str = "QUEUE_FULL", **metadata: object) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_after_s, metadata)


class Unavailable(_RetryableError):
    """Draining, no worker, or a lost part of the cluster; gRPC clients may retry this by themselves."""

    def __init__(
        self, message: str, retry_after_s: float = 1.0, *, reason: str = "UNAVAILABLE", **metadata: object
    ) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s, metadata)


class DeadlineExceeded(TandemError):
    """The client's deadline passed."""

    def __init__(
        self, message: str = "the deadline passed", *, reason: str = "DEADLINE_EXCEEDED", **metadata: object
    ) -> None:
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, reason, message, metadata)


class Cancelled(TandemError):
    """Nobody waits for the answer any more."""

    def __init__(self, message: str = "cancelled", *, reason: str = "CANCELLED", **metadata: object) -> None:
        super().__init__(grpc.StatusCode.CANCELLED, reason, message, metadata)


class Unimplemented(TandemError):
    """A legal request for something this build can't do."""

    def __init__(self, message: str, *, reason: str = "UNIMPLEMENTED", **metadata: object) -> None:
        super().__init__(grpc.StatusCode.UNIMPLEMENTED, reason, message, metadata)


class Internal(TandemError):
    """A bug of ours. The message goes to the client: no paths, no prompts, no tracebacks."""

    def __init__(self, message: str = "internal error", *, reason: str = "INTERNAL", **metadata: object) -> None:
        super().__init__(grpc.StatusCode.INTERNAL, reason, message, metadata)


class RpcContext(Protocol):
    """What `abort` needs of a `grpc.aio.ServicerContext`."""

    def trailing_metadata(self) -> Any: ...

    async def abort_with_status(self, status: grpc.Status) -> NoReturn: ...


class _RpcStatus(grpc.Status):
    """A grpc.Status by hand: `rpc_status.to_status` has no room for further trailers."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...]):
        self.code = code
        self.details = details
        self.trailing_metadata = trailing_metadata


def to_status(error: BaseException) -> status_pb2.Status:
    """The status of any exception. An unknown one becomes INTERNAL without its text (see `as_tandem_error`)."""
    error = as_tandem_error(error)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in [info, *error.details()]:
        packed = AnyMessage()
        packed.Pack(detail, deterministic=True)
        status.details.append(packed)
    return status


def from_status(status: status_pb2.Status) -> TandemError:
    """The error behind a status, of the class that `to_status` was given; details it can't read are left out.

    A status that is not ours (gRPC's own RESOURCE_EXHAUSTED for a message too large, say) has no ErrorInfo of our
    domain: it becomes a plain TandemError with the code's name as reason, except UNAVAILABLE, DEADLINE_EXCEEDED,
    CANCELLED, UNIMPLEMENTED and INTERNAL, which mean the same whoever says them.
    """
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    info = _detail(status, error_details_pb2.ErrorInfo)
    ours = info is not None and info.domain == DOMAIN and _REASON.fullmatch(info.reason) is not None
    reason = info.reason if info is not None and ours else code.name
    metadata = dict(info.metadata) if info is not None and ours else {}
    error = _empty_error(code, status)
    error.code = code
    error.reason = reason
    error.message = shorten(status.message, MAX_MESSAGE_BYTES)
    error.metadata = _bounded_metadata(metadata)
    error.args = (error.message,)
    return error


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """The error behind a failed call, for clients: reads `grpc-status-details-bin`, or code and message without it."""
    call = cast("Any", error)
    code = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    message = (call.details() if hasattr(call, "details") else str(error)) or ""
    trailers = call.trailing_metadata() if hasattr(call, "trailing_metadata") else None
    for key, value in trailers or ():
        if key != DETAILS_KEY:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            break
        # Proxies rewrite code and message at times; then the outer ones are what the client was told.
        if status.code == code.value[0]:
            return from_status(status)
    return from_status(status_pb2.Status(code=code.value[0], message=message))


def as_tandem_error(error: BaseException) -> TandemError:
    """The error to tell a client. Only a TandemError speaks for itself: other texts may hold internals or a prompt."""
    if isinstance(error, TandemError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Cancelled()
    if isinstance(error, TimeoutError):
        return DeadlineExceeded()
    if isinstance(error, grpc.RpcError):
        inner = from_rpc_error(error)
        if inner.reason != inner.code.name:
            return inner
        if inner.code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable("a part of the cluster can't be reached")
        if inner.code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
            return from_status(status_pb2.Status(code=inner.code.value[0], message=inner.code.value[1]))
    return Internal()


async def abort(context: RpcContext, error: BaseException) -> NoReturn:
    """End the RPC with the error's status; never returns. An unknown exception is logged with its traceback first.

    A cancelled handler must end by CancelledError, or the client could hang: that one is raised again, not converted.
    gRPC's own failure of a write or of telling the status says that the client has gone meanwhile (its deadline passed,
    for instance): nobody can be told, and the handler ends in the same way.
    """
    if isinstance(error, asyncio.CancelledError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError("the client has gone") from error
    if not isinstance(error, TandemError | grpc.RpcError | TimeoutError):
        logger.error("unexpected error in an RPC", exc_info=error)
    told = as_tandem_error(error)
    trailers: list[tuple[str, str | bytes]] = [
        (key, value) for key, value in context.trailing_metadata() or () if key not in (DETAILS_KEY, PUSHBACK_KEY)
    ]
    trailers.append((DETAILS_KEY, to_status(told).SerializeToString()))
    if isinstance(told, _RetryableError):
        # gRPC clients with a retry policy wait this long before they try again.
        trailers.append((PUSHBACK_KEY, str(round(told.retry_after_s * 1000))))
    try:
        await context.abort_with_status(_RpcStatus(told.code, told.message, tuple(trailers)))
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError("the client has gone") from gone
    raise AssertionError("abort_with_status returned")


def shorten(text: str, max_bytes: int) -> str:
    """The text, cut to so many bytes of UTF-8, with an ellipsis where something is missing."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def _bounded_metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    bounded: dict[str, str] = {}
    size = 0
    for key, value in metadata.items():
        name, text = shorten(str(key), 64), shorten(str(value), MAX_VALUE_BYTES)
        size += len(name.encode()) + len(text.encode())
        if size > MAX_METADATA_BYTES:
            break
        bounded[name] = text
    return bounded


def _upper_snake(text: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", text[:32].upper()).strip("_").lstrip("0123456789_") or "RESOURCE"


def _detail(status: status_pb2.Status, kind: type[Any]) -> Any | None:
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            try:
                packed.Unpack(message)
            except DecodeError:
                return None
            return message
    return None


def _empty_error(code: grpc.StatusCode, status: status_pb2.Status) -> TandemError:
    """An error of the right class with its details; `from_status` fills in reason, message and metadata."""
    bad_request = _detail(status, error_details_pb2.BadRequest)
    if code is grpc.StatusCode.INVALID_ARGUMENT and bad_request is not None and bad_request.field_violations:
        violation = bad_request.field_violations[0]
        return InvalidField(violation.field, violation.description)
    resource = _detail(status, error_details_pb2.ResourceInfo)
    if resource is not None and code is grpc.StatusCode.NOT_FOUND:
        return NotFound(resource.resource_type, resource.resource_name)
    if resource is not None and code is grpc.StatusCode.ALREADY_EXISTS:
        return AlreadyExists(resource.resource_type, resource.resource_name)
    retry = _detail(status, error_details_pb2.RetryInfo)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable("", 1.0 if retry is None else retry.retry_delay.ToMilliseconds() / 1000)
    if retry is not None and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFull("", retry.retry_delay.ToMilliseconds() / 1000)
    plain: dict[grpc.StatusCode, type[DeadlineExceeded | Cancelled | Unimplemented | Internal]] = {
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
        grpc.StatusCode.INTERNAL: Internal,
    }
    if code in plain:
        return plain[code]("")
    return TandemError(code, code.name, "")
