"""What all benchmarks share: how to run one, and what becomes of its result."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from loguru import logger
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Result:
    """What a benchmark found."""

    name: str
    data: Mapping[str, Any]
    """Goes to the JSON file, with the machine."""
    tables: Sequence[Table]
    figure: Figure
    claims: Mapping[str, bool]
    """What the benchmark says of frozen_opt -> whether this run bears it out."""

    def finish(self, full: bool) -> bool:
        """Print the tables, write JSON and PNG, and say which claims hold. Do all of them?"""
        folder = RESULTS if full else RESULTS / "small"
        folder.mkdir(parents=True, exist_ok=True)
        written = {"machine": machine(), "full": full, "claims": self.claims, **self.data}
        Path(folder, f"{self.name}.json").write_text(json.dumps(written, indent=1) + "\n")
        self.figure.savefig(Path(folder, f"{self.name}.png"), dpi=100)
        for each in self.tables:
            console.print(each)
        for claim, holds in self.claims.items():
            console.print("[green]holds[/]" if holds else "[bold red]FAILS[/]", claim, highlight=False)
        return all(self.claims.values())


def command_line(run: Callable[[bool], Result]) -> None:
    """Make a program of a benchmark: its exit code is 1 if a claim fails."""

    def main(
        full: bool = typer.Option(False, "--full", help="Full sizes, as in benchmarks/results."),
    ) -> None:
        raise typer.Exit(not run(full).finish(full))

    main.__doc__ = sys.modules[run.__module__].__doc__
    typer.run(main)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose first column is text, and all others numbers."""
    result = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        result.add_column(column, justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        result.add_row(*map(str, row))
    return result


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


@contextmanager
def log_to_nowhere() -> Iterator[None]:
    """Records are formatted and written, as they would be, but to /dev/null."""
    logger.remove()
    with open(os.devnull, "w") as nowhere:
        handler = logger.add(nowhere)
        yield
        logger.remove(handler)
    logger.add(sys.stderr)


def machine() -> dict[str, Any]:
    """What the numbers were measured on; nothing that tells whose it is."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), cpu)
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "transformers", "torch-optimizer", "deepspeed", "frozen_opt"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "versions": versions,
    }
