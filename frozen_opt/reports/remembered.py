"""What this process remembers of each role: its report, and what is frozen.

That is where the frozen parameters stand, which flag each had before, and which optimizers the role got, so
that a later call can tell what is new, what to thaw, and what another role's optimizer holds. It refers to no
tensor: see `places`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from frozen_opt.errors import UnmatchedPatternError
from frozen_opt.matching.names import module_list, unwrapped
from frozen_opt.matching.places import Place
from frozen_opt.reports.freeze_report import FreezeReport


class Kept(NamedTuple):
    """What is remembered of a frozen parameter beside its place."""

    name: str
    flag: bool
    """Its requires_grad before any role froze it."""


@dataclass
class _Role:
    """What this process remembers of a role; of all its models, a role may freeze several."""

    report: FreezeReport
    places: dict[Place, Kept] = field(default_factory=dict)
    models: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """The bare models of which something is frozen, be it on other ranks alone."""
    optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    unmatched: str = ""
    """The error for what matches nothing in the chunks so far: why the report can't be given yet."""

    @property
    def frozen(self) -> list[tuple[str, Place]]:
        return [(kept.name, place) for place, kept in self.places.items()]


_roles: dict[str, _Role] = {}


def report(role: str) -> FreezeReport:
    """The report of a role's last call in this process; of none frozen where there was no call.

    Raises:
        UnmatchedPatternError: A hook froze the model chunk by chunk, and a pattern matches in none so far.
    """
    if role not in _roles:
        return FreezeReport(role)
    if _roles[role].unmatched:
        raise UnmatchedPatternError(_roles[role].unmatched)
    return _roles[role].report


def metrics(role: str | None = None) -> dict[str, int]:
    """How many parameters and elements are frozen: those that stand in the roles' reports.

    Args:
        role: If given, this role's alone, without a prefix: for trainers that prefix by themselves, and for
            a role that was never called. By default all roles that called, as `<role>/...`; where none
            has, `policy/...` with 0.
    """
    if role is not None:
        return report(role).metrics(prefix=False)
    return {key: value for name in _roles or ("policy",) for key, value in report(name).metrics().items()}


def reset() -> None:
    """Forget every role, between two runs in one process, say. Parameters stay as they are."""
    _roles.clear()


def record(
    new: FreezeReport,
    *,
    frozen: Mapping[Place, Kept],
    released: Iterable[Place] = (),
    models: Sequence[nn.Module] = (),
    optimizers: Iterable[Any] = (),
    unmatched: str = "",
) -> bool:
    """Remember a report, in place of what the role had frozen of this model.

    Args:
        new: The report.
        frozen: What is frozen on this rank.
        released: What the role had frozen of this model until now.
        models: The bare model, or its chunks.
        optimizers: What the factory built.
        unmatched: Why the report can't be given yet.

    Returns:
        Whether it is news: freezing in a pre-wrap hook and then building the optimizer with the same list
        reports twice what is one freeze.
    """
    entry = _roles.setdefault(new.role, _Role(new))
    ids = set(map(id, models))
    again = [reference for reference in entry.models if id(reference()) in ids]
    old = entry.report
    news = not again or (old.patterns, old.names, old.untied) != (new.patterns, new.names, new.untied)
    entry.report, entry.unmatched = new, unmatched
    for place in released:
        entry.places.pop(place, None)
    entry.places = {place: kept for place, kept in entry.places.items() if place.module is not None}
    entry.places.update(frozen)
    others = [reference for reference in entry.models if reference() is not None and reference not in again]
    entry.models = [*others, *map(weakref.ref, models)] if new.patterns else others
    _remember(entry, optimizers)
    return news


def record_none(role: str, optimizers: Iterable[Any]) -> None:
    """Remember a call that froze nothing: what the role has frozen of another model stays its report."""
    entry = _roles.setdefault(role, _Role(FreezeReport(role)))
    if not any(model() is not None for model in entry.models):
        entry.report, entry.unmatched = FreezeReport(role), ""
    _remember(entry, optimizers)


def _remember(entry: _Role, optimizers: Iterable[Any]) -> None:
    living = [reference for reference in entry.optimizers if reference() is not None]
    known = {id(reference()) for reference in living}
    entry.optimizers = living + [
        weakref.ref(optimizer)
        for optimizer in optimizers
        if hasattr(optimizer, "__weakref__") and id(optimizer) not in known
    ]


def frozen_so_far() -> Iterator[tuple[str, str, torch.Tensor]]:
    """What all roles have frozen so far: role, canonical name, tensor."""
    for role, entry in _roles.items():
        for name, place in entry.frozen:
            if (tensor := place()) is not None:
                yield role, name, tensor


def has_frozen(role: str) -> bool:
    """Whether a role has anything frozen, of any living model."""
    return role in _roles and any(model() is not None for model in _roles[role].models)


def frozen_before(role: str, model: object) -> dict[Place, Kept] | None:
    """What a role has frozen of a model on this rank; None where it has frozen nothing of it on any rank.

    Args:
        role: The role.
        model: The model, however wrapped by now, or its chunks.
    """
    entry = _roles.get(role)
    if entry is None or not entry.models:
        return None
    chunks = module_list(model)
    modules = {id(module) for chunk in chunks for module in chunk.modules()}
    places = {place: kept for place, kept in entry.places.items() if id(place.module) in modules}
    known = {id(reference()) for reference in entry.models}
    return places if places or not known.isdisjoint(id(unwrapped(chunk)) for chunk in chunks) else None


def first_flags() -> dict[int, bool]:
    """Id of each tensor that a role has frozen -> its requires_grad before any role did."""
    flags: dict[int, bool] = {}
    for entry in _roles.values():
        for place, kept in entry.places.items():
            flags.setdefault(id(place()), kept.flag)
    return flags


def frozen_elsewhere(role: str) -> set[int]:
    """Ids of the tensors that other roles have frozen."""
    return {id(place()) for other, entry in _roles.items() if other != role for place in entry.places}


def optimizers_elsewhere(role: str) -> Iterator[tuple[str, Any]]:
    """Other roles, and the optimizers that they got."""
    for other, entry in _roles.items():
        if other != role:
            for reference in entry.optimizers:
                if (optimizer := reference()) is not None:
                    yield other, optimizer
