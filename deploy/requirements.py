"""Print what an image installs before the code: pyproject's dependencies, or those of one extra. Needs no packages.

`python requirements.py [EXTRA]`, with pyproject.toml beside it or one folder up.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extra: str | None = None) -> list[str]:
    """The requirements as they are written there. Raises KeyError for an extra that there isn't."""
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    found: list[str] = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return found


def main() -> int:
    here = Path(__file__).resolve().parent
    pyproject = next(path for path in (here / "pyproject.toml", here.parent / "pyproject.toml") if path.is_file())
    print("\n".join(requirements(pyproject, *sys.argv[1:2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
