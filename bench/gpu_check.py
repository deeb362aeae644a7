"""Is the GPU path right and fast on this machine? One script, minutes:  make gpu-check

Checks the Triton kernels against float64 and the CPU, that a token's logits have the same bits however they are
computed, CUDA graphs; then measures a model of Llama 3 8B's shape with random weights, each figure beside its floor.
Prints tables, writes JSON with --json. Exit status: 0 if everything is right, 1 if something is wrong, 2 without a GPU.

    python -m bench.gpu_check                        on a GPU
    python -m bench.gpu_check --tiny --device cpu    the same code on a toy, in Triton's interpreter: seconds
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

if __name__ == "__main__":
    # A script's own folder comes first, and in this one `engine` is a benchmark.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(stderr=False)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} sees no CUDA GPU here; "
            "`--tiny --device cpu` runs the same code on a toy",
            file=sys.stderr,
        )
        return 2
    if options.device == "cpu":
        if not options.tiny:
            print("gpu-check: on a CPU only --tiny", file=sys.stderr)
            return 2
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    from bench.gpu_report import Check, Report
    from bench.gpu_run import Run  # imports triton

    report, began = Report(), time.monotonic()

    @contextmanager
    def section(name: str) -> Iterator[None]:
        """What goes wrong in one section is reported, and the next one runs."""
        console.print(f"[dim]{time.monotonic() - began:4.0f} s  {name} …[/]")
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            report.checks.append(Check(name, False, f"{type(error).__name__}: {error}".partition("\n")[0]))

    with torch.inference_mode():
        run = Run(torch.device(options.device), tiny=options.tiny, report=report)
        parts: list[tuple[str, Callable[[], None]]] = run.sections()
        for name, part in parts:
            with section(name):
                part()
    report.facts["seconds"] = f"{time.monotonic() - began:.0f}"
    report.show(console)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
    return 0 if report.passed else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Is the GPU path right and fast on this machine?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy instead of 8 billion parameters")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
