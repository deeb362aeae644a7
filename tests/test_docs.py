"""Pages under docs/ that must agree with the code. `make docs` (or running this file) writes the generated one anew."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.config import settings_of, spell, variable
from draft_worker.config import DraftWorkerConfig
from gateway.config import GatewayConfig
from scheduler.config import SchedulerConfig
from worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "configuration.md"
ERRORS = ROOT / "docs" / "errors.md"
SERVICES = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "draft_worker": DraftWorkerConfig,
}

INTRODUCTION = """# Configuration

<!-- Written by `make docs` from the services' configuration classes; a test compares. -->

`tandem up` starts every service with fitting settings; this page is for those who start services one by one, with
`python -m gateway` and so on. Each setting can come from three places; a later one wins:

1. a TOML file, `--config FILE` or `TANDEM_<SERVICE>_CONFIG`: the fields at its top level, or a table per service
   (`[gateway]`, `[scheduler]`, `[worker]`, `[draft_worker]`), so that one file configures a whole cell;
2. the environment, `TANDEM_<SERVICE>_<FIELD>`; lists are comma-separated there;
3. flags, `--field` with dashes; flags of lists may be repeated.

A wrong value ends the process with status 2 and a message that names the field, where the value came from and what is
allowed. Everything listens on the loopback address unless `host` says otherwise.

```toml
[gateway]
host = "0.0.0.0"
scheduler = "10.0.0.5:50052"
model = ["smollm2=/models/smollm2"]

[worker]
scheduler = "10.0.0.5:50052"
dtype = "bfloat16"
```
"""


def configuration_page() -> str:
    parts = [INTRODUCTION]
    for service, config_class in SERVICES.items():
        about = (config_class.__doc__ or "").strip()
        head = f"## {service}\n\n{about}\n\n`python -m {service}`, variables `{variable(service, 'field').upper()}`.\n"
        rows = ["| field | default | meaning |", "| --- | --- | --- |"]
        for setting in settings_of(config_class):
            default = "required" if setting.required else f"`{spell(setting.default)}`"
            if not setting.required and setting.default in ("", (), None):
                default = "unset"
            meaning = str(setting.metadata.get("help", ""))
            if setting.metadata.get("choices"):
                meaning += ": " + ", ".join(f"`{choice}`" for choice in setting.metadata["choices"])
            if setting.many:
                meaning += " (a list)"
            rows.append(f"| `{setting.name}` | {default} | {meaning.replace('|', chr(92) + '|')} |")
        parts.append(head + "\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def reasons_in_code() -> set[str]:
    """Every literal reason that an error of a service can carry."""
    found: set[str] = set()
    for package in ("gateway", "scheduler", "worker", "draft_worker", "drafting", "cluster", "engine"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text("utf-8")
            found |= set(re.findall(r'reason(?:: str)?\s*=\s*"([A-Z][A-Z0-9_]+)"', text))
    return found


def test_the_configuration_page_is_that_of_the_code() -> None:
    assert CONFIGURATION.read_text("utf-8") == configuration_page(), "run `make docs`"


def test_every_setting_is_explained() -> None:
    for config_class in SERVICES.values():
        for setting in settings_of(config_class):
            assert setting.metadata.get("help"), f"{config_class.__name__}.{setting.name} has no help"


def test_every_reason_is_in_the_errors_page() -> None:
    reasons = reasons_in_code()
    assert {"QUEUE_FULL", "INVALID_FIELD", "INTERNAL"} <= reasons, "the search finds reasons"
    page = ERRORS.read_text("utf-8")
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration_page(), "utf-8")
