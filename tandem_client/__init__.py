"""A small typed client of a Tandem cluster.

from tandem_client import SyncTandemClient

with SyncTandemClient("127.0.0.1:50051") as client:
    print(client.generate("Once upon a time", max_tokens=64, temperature=0.7, seed=1).text)
"""

from cluster.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidField,
    NotFound,
    QueueFull,
    TandemError,
    Unavailable,
    Unimplemented,
)
from tandem_client.client import DEFAULT_TARGET, TandemClient
from tandem_client.resume import collect
from tandem_client.retry import NO_RETRY, RetryPolicy
from tandem_client.sync import SyncTandemClient
from tandem_client.types import (
    Choice,
    Chunk,
    Delta,
    FinishReason,
    Generation,
    Message,
    Model,
    PositionLogprobs,
    Request,
    Speculation,
    TokenLogprob,
    Usage,
)

__all__ = [
    "DEFAULT_TARGET",
    "NO_RETRY",
    "AlreadyExists",
    "Cancelled",
    "Choice",
    "Chunk",
    "DeadlineExceeded",
    "Delta",
    "FinishReason",
    "Generation",
    "Internal",
    "InvalidField",
    "Message",
    "Model",
    "NotFound",
    "PositionLogprobs",
    "QueueFull",
    "Request",
    "RetryPolicy",
    "Speculation",
    "SyncTandemClient",
    "TandemClient",
    "TandemError",
    "TokenLogprob",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "collect",
]
