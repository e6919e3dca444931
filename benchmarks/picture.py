"""The README's picture of what `frozen-opt demo` prints, from a real run: `python -m benchmarks.picture`."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path

from loguru import logger
from rich.console import Console
from rich.text import Text

from benchmarks.common import RESULTS
from frozen_opt.demo.run import run

COLUMNS = 96
"""As many as can be read at the width that GitHub gives a README."""


def draw(overrides: Sequence[str], path: Path) -> bool:
    """Run the demo with these overrides, and write its log, its first and last step, and its end as SVG.

    Gives what the demo gives: whether no frozen tensor moved.
    """
    log: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        redirect_stdout(io.StringIO()) as printed,
    ):
        handler = logger.add(
            log.append, level="INFO", format="<level>{level} | </level>{message}", colorize=True
        )
        try:
            held = run(overrides, Path("frozen-opt-demo"))
        finally:
            logger.remove(handler)
    lines = printed.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step=")]
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.assemble(("$ ", "green"), " ".join(["frozen-opt demo", *overrides])))
    for record in log:
        console.print(Text.from_ansi(record.rstrip()))
    for line in (steps[0], "⋮", steps[-1]):
        console.print(Text(line, style="dim"), no_wrap=True, overflow="ellipsis")
    for line in lines[len(steps) :]:
        console.print(Text(line))
    console.save_svg(str(path), title="frozen-opt demo")
    return held


if __name__ == "__main__":
    sys.exit(not draw([], RESULTS / "demo.svg"))
