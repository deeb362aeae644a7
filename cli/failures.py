"""One line for each thing that can go wrong; what is missing here is a bug and keeps its traceback."""

from __future__ import annotations

import errno

from cli.model_source import ModelUnavailable
from cli.supervisor import ClusterFailed
from cli.up import PortTaken
from cluster.errors import InvalidField, TandemError, Unavailable, Unimplemented


class UsageError(Exception):
    """The flags or a file can't be used as they are; the message is fit for a user."""


def explain(error: Exception) -> str | None:
    """What to tell the user, or None for a bug."""
    if isinstance(error, UsageError | ModelUnavailable | ClusterFailed | PortTaken):
        return str(error)
    if isinstance(error, InvalidField):
        return f"{error.code.name}: {error.field}: {error.description}"
    if isinstance(error, Unavailable) and "failed to connect" in error.message.lower():
        return (
            f"no cluster answers ({_address(error.message)}); start one with `tandem up`, or name one with --target "
            "(status, drain: --scheduler)"
        )
    if isinstance(error, Unimplemented) and "method not found" in error.message.lower():
        return "something else listens there: --target takes a gateway, --scheduler (status, drain) the scheduler"
    if isinstance(error, TandemError):
        return f"{error.code.name}: {error.message}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {error.filename or error.strerror}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return None


def _address(message: str) -> str:
    """HOST:PORT out of gRPC's own words."""
    for word in message.replace(";", " ").split():
        if word.startswith(("ipv4:", "ipv6:")):
            return word.partition(":")[2].rstrip(":")
    return "connection refused"
