"""Configuration: one frozen dataclass per service, read once, in one place.

    TOML file (--config FILE)  <  environment (TANDEM_<SERVICE>_<FIELD>)  <  flags (--field)

A field's type is str, int, float, bool, one of these or None, or a tuple of one of these (`tuple[str, ...]`: a flag
that may be repeated, a TOML array, a comma-separated variable). Its metadata holds `help`, and where wanted `choices`,
`min`, `max` (inclusive) and `metavar`. A class may have `validate(self)`, which raises ValueError; it is called once.

A TOML file holds the fields at its top level, or one table per service ([gateway], [scheduler], …) so that one file can
configure a whole cell. Every mistake ends the process with status 2 and a message that names the field, the flag, where
the value came from and what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cluster.telemetry import version

C = TypeVar("C")

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
# Kubernetes sets TANDEM_GATEWAY_PORT=tcp://10.0.0.1:50051 for a Service named tandem-gateway: a link, not our setting.
_SERVICE_LINK = re.compile(r"(tcp|udp)://")


class ConfigError(ValueError):
    """A setting is wrong; the message is fit for a user."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of the class, as flags, files and variables see it."""

    name: str
    kind: type
    many: bool
    optional: bool
    required: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def load(
    config_class: type[C],
    prog: str,
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> C:
    """The configuration of the service `prog` (its last word names the TOML table and the variables).

    `argv` without the program's name, and `env`, default to the process's own. --help and --version print and exit with
    status 0; a wrong setting exits with status 2.
    """
    settings = settings_of(config_class)
    service = prog.split()[-1]
    parser = _parser(config_class, prog, service, settings)
    given = vars(parser.parse_args(argv))
    environment = os.environ if env is None else env
    try:
        return _build(config_class, service, settings, given, environment)
    except ConfigError as error:
        parser.error(str(error))


def variable(service: str, field: str) -> str:
    """The environment variable of a field: TANDEM_DRAFT_WORKER_MAX_DRAFT_TOKENS and the like."""
    return f"TANDEM_{service}_{field}".replace("-", "_").upper()


def to_flags(config: Any, config_class: type | None = None) -> list[str]:
    """The flags that make `load` build an equal configuration; for starting a service as a child process."""
    flags: list[str] = []
    for setting in settings_of(config_class or type(config)):
        value = getattr(config, setting.name)
        if value == setting.default and not setting.required:
            continue
        if setting.many:
            flags += [f"{setting.flag}={item}" for item in value]
        elif setting.kind is bool:
            flags.append(setting.flag if value else "--no-" + setting.flag[2:])
        elif value is not None:
            flags.append(f"{setting.flag}={value}")
    return flags


def settings_of(config_class: type) -> list[Setting]:
    """Every field of the class, in order, and then those that it inherits. Raises TypeError for a type that no flag can
    carry: a bug of the class.
    """
    hints = typing.get_type_hints(config_class)
    settings = []
    own = vars(config_class).get("__annotations__", {})
    for field in sorted(dataclasses.fields(config_class), key=lambda field: field.name not in own):
        hint, optional, many = hints[field.name], False, False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            inner = [part for part in typing.get_args(hint) if part is not type(None)]
            optional = len(inner) < len(typing.get_args(hint))
            if len(inner) != 1:
                raise TypeError(f"{config_class.__name__}.{field.name}: a union of several types is not supported")
            hint = inner[0]
        if typing.get_origin(hint) is tuple:
            hint, many = typing.get_args(hint)[0], True
        if hint not in (str, int, float, bool):
            raise TypeError(f"{config_class.__name__}.{field.name}: type {hint!r} is not supported")
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = None if required else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        settings.append(Setting(field.name, hint, many, optional, required, default, field.metadata))
    return settings


def _parser(config_class: type, prog: str, service: str, settings: Sequence[Setting]) -> argparse.ArgumentParser:
    text = (config_class.__doc__ or "").strip()
    parser = argparse.ArgumentParser(
        prog=prog,
        description=text.split("\n\n")[0] if not text.startswith(config_class.__name__ + "(") else None,
        epilog=f"A flag wins over its variable, a variable over the file. Variables: {variable(service, 'field')} for "
        "--field, and so on; lists are comma-separated there.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{prog} {version()}")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file; also {variable(service, 'config')}")
    for setting in settings:
        options: dict[str, Any] = {"help": _help(setting), "dest": setting.name}
        if setting.kind is bool and not setting.many:
            options["action"] = argparse.BooleanOptionalAction
        else:
            choices = setting.metadata.get("choices")
            fallback = "|".join(map(str, choices)) if choices else setting.kind.__name__.upper()
            options["metavar"] = setting.metadata.get("metavar", fallback)
            if setting.many:
                options["action"] = "append"
        parser.add_argument(setting.flag, **options)
    return parser


def _help(setting: Setting) -> str:
    text = str(setting.metadata.get("help", "")).replace("%", "%%")
    notes = []
    if setting.many:
        notes.append("may be repeated")
    if setting.required:
        notes.append("required")
    elif setting.default is not None and setting.default != () and setting.default != "":
        notes.append(f"default {spell(setting.default)}".replace("%", "%%"))
    return f"{text} ({'; '.join(notes)})" if notes else text


def spell(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _build(
    config_class: type[C],
    service: str,
    settings: Sequence[Setting],
    given: Mapping[str, Any],
    env: Mapping[str, str],
) -> C:
    path = given.get("config") or env.get(variable(service, "config")) or None
    file = {} if path is None else _read_file(Path(path), service, settings)
    values: dict[str, Any] = {}
    for setting in settings:
        name = variable(service, setting.name)
        if setting.name in given:
            values[setting.name] = _parse(setting, given[setting.name], setting.flag)
        elif name in env and not _SERVICE_LINK.match(env[name]):
            values[setting.name] = _parse(setting, env[name], name)
        elif setting.name in file:
            values[setting.name] = _parse(setting, file[setting.name], str(path))
        elif setting.required:
            raise ConfigError(f"{setting.name} is missing: set {setting.flag}, {name} or {setting.name} in the file")
    config = config_class(**values)
    validate = getattr(config, "validate", None)
    if validate is not None:
        try:
            validate()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return config


def _read_file(path: Path, service: str, settings: Sequence[Setting]) -> Mapping[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are ones
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    if any(isinstance(value, dict) for value in document.values()):
        stray = [key for key, value in document.items() if not isinstance(value, dict)]
        if stray:
            raise ConfigError(f"{path}: {stray[0]} stands outside of a table; move it under [{service}]")
        document = document.get(service, {})
    known = {setting.name: setting for setting in settings}
    fields: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown setting {key}{hint}")
        fields[name] = value
    return fields


def _parse(setting: Setting, value: Any, source: str) -> Any:
    """The checked value of a setting. Texts come from flags and variables, other types from TOML."""

    def wrong(allowed: str, got: Any = value) -> ConfigError:
        flag = "" if source == setting.flag else f" ({setting.flag})"
        return ConfigError(f"{setting.name}{flag}: {source} gives {got!r}, but {allowed}")

    if setting.many:
        items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise wrong(f"it is a list of {setting.kind.__name__}")
        return tuple(_scalar(setting, item, wrong) for item in items)
    if setting.optional and isinstance(value, str) and value.lower() in ("", "none"):
        return None
    return _scalar(setting, value, wrong)


def _scalar(setting: Setting, value: Any, wrong: Any) -> Any:
    parsed = _typed(setting, value, wrong)
    choices = setting.metadata.get("choices")
    if choices is not None and parsed not in choices:
        raise wrong(f"it must be one of {', '.join(map(str, choices))}", value)
    low, high = setting.metadata.get("min"), setting.metadata.get("max")
    if (low is not None and parsed < low) or (high is not None and parsed > high):
        bounds = [f"at least {low}"] if low is not None else []
        bounds += [f"at most {high}"] if high is not None else []
        raise wrong(f"it must be {' and '.join(bounds)}", value)
    return parsed


def _typed(setting: Setting, value: Any, wrong: Any) -> Any:
    if setting.kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise wrong("it must be true or false", value)
    if setting.kind is str:
        if not isinstance(value, str):
            raise wrong("it must be a text", value)
        return value
    article = "a whole number" if setting.kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong(f"it must be {article}", value)
    if setting.kind is int and isinstance(value, float):
        raise wrong(f"it must be {article}", value)
    try:
        number = setting.kind(value)
    except ValueError:
        raise wrong(f"it must be {article}", value) from None
    if setting.kind is float and not math.isfinite(number):
        raise wrong("it must be finite", value)
    return number
