"""One tidy line per event, on stderr.

    14:03:07.512 INFO  scheduler  worker attached  worker=w1 blocks=512

or, with `style="json"`, one JSON object per line with the same names. Values are quoted where they need it and
shortened, so that neither a line break nor a prompt gets into a log by way of a value.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from typing import IO

LEVELS = ("debug", "info", "warning", "error")
STYLES = ("text", "json")
MAX_VALUE_CHARACTERS = 300

_PLAIN = re.compile(r"[^\s\"'=\x00-\x1f\x7f]+")
_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}


def setup(service: str, level: str = "info", style: str = "text", stream: IO[str] | None = None) -> None:
    """Send every logger's lines to stderr, marked with the service. Calling it again replaces the earlier setup."""
    if level not in LEVELS or style not in STYLES:
        raise ValueError(f"level is one of {', '.join(LEVELS)} and style one of {', '.join(STYLES)}")
    target = stream if stream is not None else sys.stderr
    output = logging.StreamHandler(target)
    colour = style == "text" and hasattr(target, "isatty") and target.isatty()
    output.setFormatter(_JsonLines(service) if style == "json" else _TextLines(service, colour))
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)
    # Libraries that report every request or retry at INFO.
    for name in ("asyncio", "grpc", "httpx", "urllib3", "filelock", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)


def event(
    logger: logging.Logger,
    what: str,
    *,
    level: int = logging.INFO,
    error: BaseException | None = None,
    **values: object,
) -> None:
    """Log that something happened, with named values. `error` adds its traceback."""
    if logger.isEnabledFor(level):
        logger.log(level, what, extra={"event_values": values}, exc_info=error, stacklevel=2)


def _values(record: logging.LogRecord) -> dict[str, object]:
    values = getattr(record, "event_values", None)
    return values if isinstance(values, dict) else {}


def _text(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    return text


class _TextLines(logging.Formatter):
    def __init__(self, service: str, colour: bool) -> None:
        super().__init__()
        self._service = service
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{when} {record.levelname:<7} {self._service:<12} {message}"
        pairs = []
        for name, value in _values(record).items():
            text = _text(value)
            pairs.append(f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)}")
        if pairs:
            line += "  " + " ".join(pairs)
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        colour = _COLOURS.get(record.levelno) if self._colour else None
        return f"{colour}{line}\033[0m" if colour else line


class _JsonLines(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, object] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
        }
        for name, value in _values(record).items():
            plain = value is None or isinstance(value, bool | int)
            entry[name if name not in entry else f"{name}_"] = value if plain else _text(value)
        if record.exc_info and record.exc_info[0] is not None:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)
