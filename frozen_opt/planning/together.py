"""What all ranks found put together: names in model order, matches of each pattern, what to refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from frozen_opt.errors import FreezeConfigError, NothingTrainableError, listing
from frozen_opt.matching import doubtful_patterns
from frozen_opt.matching.order import in_model_order
from frozen_opt.matching.selection import Selector
from frozen_opt.planning.local import Row, nothing_left


@dataclass(frozen=True)
class Together:
    """The findings of all ranks as one."""

    selector: Selector
    rows: Sequence[Row]
    """In model order."""
    credits: Counter[int]
    """Pattern, by index -> how many parameters it did something to."""
    thawed: Sequence[str]
    warnings: Sequence[str]
    split: str
    stuck: str
    trainable: bool

    @property
    def idle(self) -> list[str]:
        """The patterns that do nothing on any rank."""
        return [pattern for index, pattern in enumerate(self.selector.patterns) if not self.credits[index]]

    def refuse(self, *, more_to_come: bool) -> None:
        """Raise what can only be told once it is known that each pattern does something.

        Before that, a carve-out that is mistyped would hide behind what it fails to leave trainable.

        Args:
            more_to_come: The model may have more chunks than these, in which something is left to train.

        Raises:
            FreezeConfigError: The patterns select a part of what is one tensor.
            NothingTrainableError: Nothing would be left to train.
        """
        if self.split:
            raise FreezeConfigError(self.split)
        if not more_to_come and (self.stuck or not self.trainable):
            raise NothingTrainableError(self.stuck or nothing_left(self.selector))


def put_together(selector: Selector, findings: Sequence[Any]) -> Together:
    """Merge what the ranks told, `Local.telling()` of each that found something else.

    Raises:
        FreezeConfigError: The ranks don't hold the same model.
    """
    # One finding is this rank's own, in model order already.
    alone = len(findings) == 1
    rows = findings[0][0] if alone else in_model_order(_by_name(findings, selector.role))
    _, thawed, warnings, splits, stuck, trainable = zip(*findings, strict=True)
    return Together(
        selector,
        rows,
        credits=Counter(index for row in rows for index in row.credited),
        thawed=_distinct(name for names in thawed for name in names),
        warnings=[
            *_distinct(text for texts in warnings for text in texts),
            *doubtful_patterns.warnings(selector.patterns, rows, mapped=selector.name_map is not None),
        ],
        split=next(filter(None, splits), ""),
        stuck=next(filter(None, stuck), ""),
        trainable=any(trainable),
    )


def _by_name(findings: Sequence[Any], role: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for told, *_ in findings:
        for row in (Row(*row) for row in told):
            known = rows.setdefault(row.name, row)
            if known.elements != row.elements:
                raise FreezeConfigError(
                    f"role {role!r}: {listing([row.name])} has {known.elements} elements on one rank and "
                    f"{row.elements} on another: the ranks don't hold the same model"
                )
    return rows


def _distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))
