"""`python -m cli.resolve_model NAME`: fetch or convert a model and print its folder; a process of its own for torch."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn


def main(name: str) -> int:
    """Exit status 0, or 2 with the reason on stderr."""
    # The stream itself: converting redirects sys.stderr for minutes, and the bars must stay on the terminal.
    console = Console(file=sys.stderr)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("loading the engine", total=None)

        said = ""

        def progress(what: str, share: float | None) -> None:
            nonlocal said
            bars.update(task, description=what, total=None if share is None else 1.0, completed=share or 0.0)
            if not console.is_terminal and what != said:  # a log gets a line per stage
                print(what, file=console.file, flush=True)
                said = what

        from cli.model_source import DEFAULT
        from engine.default_model import fetch_default_model
        from engine.errors import ModelError
        from engine.loading import resolve_model

        try:
            folder = fetch_default_model(progress=progress) if name == DEFAULT else resolve_model(name, progress)
        except (ModelError, OSError) as error:
            bars.stop()
            print(error, file=sys.stderr)
            return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
