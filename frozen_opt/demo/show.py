"""What the demo shows: each step's metrics, and a closing table for each role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.table import Table

import frozen_opt
from frozen_opt.demo.backends import rank_and_size
from frozen_opt.demo.learners import Learner, moved, state_bytes


@contextmanager
def progress(steps: int, console: Console) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Shows a step's metrics: on a terminal below a bar, elsewhere as a line."""
    if not console.is_terminal:
        yield lambda metrics: console.print(
            *(f"{name}={_short(value)}" for name, value in metrics.items()), highlight=False, soft_wrap=True
        )
        return
    bar = Progress(*Progress.get_default_columns(), console=console)
    task = bar.add_task("training", total=steps)
    with Live(bar, console=console) as live:

        def show(metrics: Mapping[str, float]) -> None:
            bar.advance(task)
            table = Table.grid(padding=(0, 2))
            for name, value in metrics.items():
                table.add_row(name, _short(value))
            live.update(Group(bar, table))

        yield show


def summary(learner: Learner) -> Table:
    """The closing table of a role: what was frozen, whether it held, what it saved."""
    report = frozen_opt.report(learner.role)
    trainable = learner.start.keys() - set(report.names)
    astray = [*learner.astray, *moved(learner, frozen=True)]
    verdict = f"no: {', '.join(astray)}" if astray else "yes" if report.names else "none is frozen"
    total = sum(parameter.numel() for parameter in learner.model.parameters())
    _, size = rank_and_size()
    title = learner.role if size == 1 else f"{learner.role}, on {size} ranks together"
    table = Table(title=title, title_justify="left", show_header=False, min_width=72)
    table.add_row("parameters frozen", f"{report.parameter_count} of {len(learner.start)}")
    table.add_row("elements frozen", f"{report.element_count:,} of {total:,}")
    table.add_row("frozen ones bit-identical after training", verdict)
    table.add_row("trainable ones moved", f"{len(moved(learner, frozen=False))} of {len(trainable)}")
    table.add_row("optimizer state with the freeze", f"{state_bytes(learner.optimizer):,} bytes")
    table.add_row("optimizer state without it", f"{learner.state_bytes_unfrozen:,} bytes")
    return table


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
