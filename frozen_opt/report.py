"""What was frozen: reports, metrics, and the memory of this process.

The memory keeps where each role's frozen parameters stand, which flag each had before, and which optimizers
the role got, so that a later call can tell what is new, what to thaw, and what another role's optimizer
holds. It refers to no tensor: see `places`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from frozen_opt import ranks
from frozen_opt.errors import UnmatchedPatternError
from frozen_opt.names import module_list, unwrapped
from frozen_opt.places import Place

if TYPE_CHECKING:
    from frozen_opt.verify import Fingerprint


@dataclass(frozen=True)
class Frozen:
    """A role's frozen parameters, as planned or as done. Counts and names are those of all ranks."""

    role: str
    patterns: tuple[str, ...] = ()
    backend: str = ""
    names: tuple[str, ...] = ()
    """Canonical names in model order; a tied parameter stands under its first name."""
    matches: Mapping[str, int] = field(default_factory=dict)
    """Pattern -> how many parameters it matched; for a carve-out, how many it took away."""
    element_count: int = 0
    """Elements of all frozen parameters in full, shards put together."""
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a frozen parameter -> its other names."""
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a frozen parameter -> the names of the name map by which the patterns matched it."""
    thawed: tuple[str, ...] = ()
    """What the list before froze and this one does not: it gets back the flag that it had."""

    @property
    def parameter_count(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class FreezeReport(Frozen):
    """What was frozen for a role."""

    untied: Mapping[str, str] = field(default_factory=dict)
    """Name of a frozen parameter -> the one that it was tied to until the factory ran."""
    has_optimizer: bool = True
    """False where the factory built none."""
    _seen: dict[str, tuple[int, tuple[int, ...]] | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The frozen parameters that this rank holds, and identity and shape of what `verify` found first."""
    _second: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Of which of them a second network in the same optimizer has copies, and how many."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_seen": {}}  # an identity is that of this process

    def verify(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: object = None,
        *,
        fingerprint: Fingerprint | None = None,
        group: ranks.Group = None,
    ) -> None:
        """Check that the freeze still holds, cheaply enough for each step.

        Reads no weights, but where an optimizer is given that holds tensors from outside the model: some
        of these, and of the frozen ones.

        Every frozen parameter is registered under its name, requires no gradient, and is the tensor, of
        the same shape, that the first call found there. With torch.distributed up, every rank must call,
        between steps, and all of them raise what one has found.

        Args:
            model: The model that was frozen, sharded or wrapped since.
            optimizer: If given, it may hold no frozen parameter and no copy of one; looked into as what a
                factory returns.
            fingerprint: If given, the frozen values must be those of this `fingerprint`, which does read
                them all: for checkpoints. It may come from a run with other ranks.
            group: The ranks that agree; all by default.

        Raises:
            FrozenParameterChangedError: A parameter can be trained again, was replaced, or has changed.
            FrozenParameterInOptimizerError: The optimizer holds a frozen parameter.
            UnsupportedBackendError: The optimizer or the values can't be looked into.
            FreezeConfigError: The fingerprint belongs to another freeze.
        """
        from frozen_opt.verify import verify

        verify(self, model, optimizer, fingerprint=fingerprint, group=group)

    def fingerprint(
        self, model: nn.Module | Sequence[nn.Module], *, group: ranks.Group = None
    ) -> dict[str, list[int]]:
        """Checksums of the frozen values, the same on every rank: plain data, for a checkpoint.

        Each rank reads the shards that it holds, and nothing is gathered. On the same ranks, any bit that
        changes or moves changes them; on other ranks, any that changes.

        Args:
            model: The model that was frozen, sharded or wrapped since.
            group: The ranks that hold it; all by default. Each of them must call.

        Raises:
            FreezingError: As `verify` does: only a freeze that holds gets a fingerprint.
        """
        from frozen_opt.verify import take_fingerprint

        return take_fingerprint(self, model, group=group)

    def state_dict(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """What a checkpoint should hold of this freeze: plain data, for `check_resume`.

        Args:
            model: If given with the optimizer, the names of the optimizer's parameters go along, by which
                `migrate_optimizer_state` can move its state to another freeze list.
            optimizer: A torch optimizer over the model's own parameters.
        """
        from frozen_opt.resume import report_state

        return report_state(self, model, optimizer)

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        """Check, before the optimizer's state is loaded, that it was saved under this freeze.

        Compares names: as many others are no match. No collective: every rank has the same names.

        Args:
            saved: What `state_dict` gave then.

        Raises:
            ResumeMismatchError: Other parameters were frozen; `now_trainable` and `now_frozen` name them.
            FreezeConfigError: `saved` is something else, or another role's.
        """
        from frozen_opt.resume import check_resume

        check_resume(self, saved)

    def metrics(self, *, prefix: bool = True) -> dict[str, int]:
        """`<role>/frozen_parameter_count` and `<role>/frozen_element_count`.

        Args:
            prefix: False leaves `<role>/` out, for trainers that prefix by themselves.
        """
        counts = {"frozen_parameter_count": self.parameter_count, "frozen_element_count": self.element_count}
        return {f"{self.role}/{name}" if prefix else name: count for name, count in counts.items()}


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
    doubt: str = ""
    """Why the report can't be given yet; see `record`."""

    @property
    def frozen(self) -> list[tuple[str, Place]]:
        return [(kept.name, place) for place, kept in self.places.items()]


_memory: dict[str, _Role] = {}


def report(role: str) -> FreezeReport:
    """The report of a role's last call in this process; of none frozen where there was no call.

    Raises:
        UnmatchedPatternError: A hook froze the model chunk by chunk, and a pattern matches in none so far.
    """
    if role not in _memory:
        return FreezeReport(role)
    if _memory[role].doubt:
        raise UnmatchedPatternError(_memory[role].doubt)
    return _memory[role].report


def metrics(role: str | None = None) -> dict[str, int]:
    """How many parameters and elements are frozen: those that stand in the roles' reports.

    Args:
        role: If given, this role's alone, without a prefix: for trainers that prefix by themselves, and for
            a role that was never called. By default all roles that called, as `<role>/...`; where none
            has, `policy/...` with 0.
    """
    if role is not None:
        return report(role).metrics(prefix=False)
    return {key: value for name in _memory or ("policy",) for key, value in report(name).metrics().items()}


def reset() -> None:
    """Forget every role, between two runs in one process, say. Parameters stay as they are."""
    _memory.clear()


def record(
    new: FreezeReport,
    *,
    frozen: Mapping[Place, Kept],
    released: Iterable[Place] = (),
    models: Sequence[nn.Module] = (),
    optimizers: Iterable[Any] = (),
    doubt: str = "",
) -> bool:
    """Remember a report, in place of what the role had frozen of this model.

    Args:
        new: The report.
        frozen: What is frozen on this rank.
        released: What the role had frozen of this model until now.
        models: The bare model, or its chunks.
        optimizers: What the factory built.
        doubt: Why the report can't be given yet.

    Returns:
        Whether it is news: freezing in a pre-wrap hook and then building the optimizer with the same list
        reports twice what is one freeze.
    """
    entry = _memory.setdefault(new.role, _Role(new))
    ids = set(map(id, models))
    again = [reference for reference in entry.models if id(reference()) in ids]
    old = entry.report
    news = not again or (old.patterns, old.names, old.untied) != (new.patterns, new.names, new.untied)
    entry.report, entry.doubt = new, doubt
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
    entry = _memory.setdefault(role, _Role(FreezeReport(role)))
    if not any(model() is not None for model in entry.models):
        entry.report, entry.doubt = FreezeReport(role), ""
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
    for role, entry in _memory.items():
        for name, place in entry.frozen:
            if (tensor := place()) is not None:
                yield role, name, tensor


def has_frozen(role: str) -> bool:
    """Whether a role has anything frozen, of any living model."""
    return role in _memory and any(model() is not None for model in _memory[role].models)


def frozen_before(role: str, model: object) -> dict[Place, Kept] | None:
    """What a role has frozen of a model on this rank; None where it has frozen nothing of it on any rank.

    Args:
        role: The role.
        model: The model, however wrapped by now, or its chunks.
    """
    entry = _memory.get(role)
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
    for entry in _memory.values():
        for place, kept in entry.places.items():
            flags.setdefault(id(place()), kept.flag)
    return flags


def frozen_elsewhere(role: str) -> set[int]:
    """Ids of the tensors that other roles have frozen."""
    return {id(place()) for other, entry in _memory.items() if other != role for place in entry.places}


def optimizers_elsewhere(role: str) -> Iterator[tuple[str, Any]]:
    """Other roles, and the optimizers that they got."""
    for other, entry in _memory.items():
        if other != role:
            for reference in entry.optimizers:
                if (optimizer := reference()) is not None:
                    yield other, optimizer
