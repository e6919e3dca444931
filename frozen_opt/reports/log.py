"""The log: what was frozen, once for each role and model, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loguru import logger

from frozen_opt.errors import printable
from frozen_opt.matching.braces import fold
from frozen_opt.ranks import collectives
from frozen_opt.reports.freeze_report import FreezeReport

_ALL_NAMES = 100
"""Up to so many names are logged one by one; more are folded."""


def log(report: FreezeReport, warnings: Sequence[str], group: collectives.Group) -> None:
    """Log a report with every name, and what will surprise its reader, on rank 0 of the group."""
    if not collectives.is_first(group):
        return
    if not report.patterns and not report.thawed:
        logger.debug("{}: no parameters to freeze", report.role)
        return
    data = {
        "role": report.role,
        "backend": report.backend,
        "patterns": list(report.patterns),
        "names": list(report.names),
        "ties": _lists(report.ties),
        "mapped": _lists(report.mapped),
        "untied": dict(report.untied),
        "thawed": list(report.thawed),
        **report.metrics(),
    }
    logger.bind(**data).info("{}", printable(f"{report.role}: {'; '.join(_parts(report))}"))
    for warning in warnings:
        logger.bind(role=report.role).warning("{}: {}", report.role, printable(warning))


def _parts(report: FreezeReport) -> list[str]:
    parts = _frozen(report) if report.names else []
    if report.thawed:
        parts.append(f"thawed {_count(report.thawed)}: {', '.join(fold(report.thawed))}")
    if not report.names:
        parts.append("nothing is frozen any more")
    if not report.has_optimizer:
        parts.append("the factory built no optimizer")
    return parts


def _frozen(report: FreezeReport) -> list[str]:
    said = f"froze {_count(report.names)} ({report.element_count:,} elements, backend {report.backend}): "
    if len(report.names) > _ALL_NAMES:
        mapped = [name for names in report.mapped.values() for name in names]
        parts = [said + ", ".join(fold(report.names))]
        parts += [f"matched as {', '.join(fold(mapped))}"] * bool(mapped)
    else:
        names = (
            f"{name} (matched as {', '.join(report.mapped[name])})" if name in report.mapped else name
            for name in report.names
        )
        parts = [said + ", ".join(names)]
    parts += [f"{name} is tied to {', '.join(others)}" for name, others in report.ties.items()]
    parts += [
        f"{name} was tied to {other}, and the factory broke the tie: both are frozen"
        for name, other in report.untied.items()
    ]
    return parts


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) != 1)}"


def _lists(mapping: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return {name: list(others) for name, others in mapping.items()}
