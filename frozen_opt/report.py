"""What was frozen: reports, metrics, the log, and the memory of this process.

The memory also keeps which tensors each role froze and which optimizers it got (by weak references), so
that a tensor that one role freezes and another role's optimizer holds is caught.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from torch import nn

from frozen_opt import ranks
from frozen_opt.errors import printable

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

    @property
    def parameter_count(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class FreezeReport(Frozen):
    """What was frozen for a role."""

    _held: dict[str, weakref.ref[torch.Tensor] | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The frozen parameters that this rank holds, and the tensors that `verify` found first."""
    _second: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Of which of them a second network in the same optimizer has copies, and how many."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_held": {}}  # tensors stay in their process

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

        Every frozen parameter is registered under its name, requires no gradient, and is the tensor that
        the first call found there. With torch.distributed up, every rank must call, between steps, and all
        of them raise what one has found.

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

    def metrics(self) -> dict[str, int]:
        """`<role>/frozen_parameter_count` and `<role>/frozen_element_count`."""
        return {
            f"{self.role}/frozen_parameter_count": self.parameter_count,
            f"{self.role}/frozen_element_count": self.element_count,
        }


@dataclass
class _Entry:
    report: FreezeReport
    # Of all calls: a role may freeze several models.
    frozen: list[tuple[str, weakref.ref[torch.Tensor]]]
    optimizers: list[weakref.ref[Any]]


_memory: dict[str, _Entry] = {}


def report(role: str) -> FreezeReport:
    """The report of a role for which this process has called a decorated factory, or frozen parameters.

    Raises:
        KeyError: It has not.
    """
    if role not in _memory:
        raise KeyError(f"nothing was frozen for role {role!r} in this process; roles: {sorted(_memory)}")
    return _memory[role].report


def metrics() -> dict[str, int]:
    """The metrics of all roles for which this process has called."""
    return {key: value for entry in _memory.values() for key, value in entry.report.metrics().items()}


def reset() -> None:
    """Forget every role, between two runs in one process, say. Parameters stay as they are."""
    _memory.clear()


def record(
    new: FreezeReport,
    *,
    frozen: Iterable[tuple[str, torch.Tensor]] = (),
    optimizers: Iterable[Any] = (),
    warnings: Sequence[str] = (),
    group: ranks.Group = None,
) -> None:
    """Remember a report, and log it on rank 0 unless that has been done.

    Freezing in a pre-wrap hook and then building the optimizer with the same list reports twice what
    is one freeze; the second is not logged again.
    """
    known = _memory.get(new.role)
    entry = _Entry(
        new,
        [(name, weakref.ref(tensor)) for name, tensor in frozen],
        [weakref.ref(optimizer) for optimizer in optimizers if hasattr(optimizer, "__weakref__")],
    )
    same = known is not None and _is_the_same_freeze(known, entry)
    if known is not None:
        living = [(name, reference) for name, reference in known.frozen if reference() is not None]
        entry.frozen += living
        entry.optimizers += [reference for reference in known.optimizers if reference() is not None]
        if not new.patterns and living:
            entry.report = known.report  # a hook has frozen them, and the factory's list is empty
    _memory[new.role] = entry
    if not ranks.is_first(group):
        return
    if not new.patterns:
        logger.debug("{}: no parameters to freeze", new.role)
    elif not same:
        _log(new, warnings)


def _is_the_same_freeze(known: _Entry, entry: _Entry) -> bool:
    """A hook's freeze, say, that a factory has found. Another model's is another one."""
    reports = known.report, entry.report
    if len({(report.patterns, report.names) for report in reports}) > 1:
        return False
    before = {id(reference()) for _, reference in known.frozen if reference() is not None}
    return not before or not before.isdisjoint(id(reference()) for _, reference in entry.frozen)


def frozen_so_far() -> Iterator[tuple[str, str, torch.Tensor]]:
    """What all roles have frozen so far: role, canonical name, tensor."""
    for role, entry in _memory.items():
        for name, reference in entry.frozen:
            if (tensor := reference()) is not None:
                yield role, name, tensor


def optimizers_elsewhere(role: str) -> Iterator[tuple[str, Any]]:
    """Other roles, and the optimizers that they got."""
    for other, entry in _memory.items():
        if other != role:
            for reference in entry.optimizers:
                if (optimizer := reference()) is not None:
                    yield other, optimizer


def _log(new: FreezeReport, warnings: Sequence[str]) -> None:
    names = list(new.names) if new.parameter_count <= 100 else fold(new.names)
    tied = [f"{name} is tied to {', '.join(others)}" for name, others in new.ties.items()]
    data = {
        "role": new.role,
        "backend": new.backend,
        "patterns": list(new.patterns),
        "names": list(new.names),
        "ties": {name: list(others) for name, others in new.ties.items()},
        **new.metrics(),
    }
    parameters = "parameter" if new.parameter_count == 1 else "parameters"
    text = (
        f"{new.role}: froze {new.parameter_count} {parameters} ({new.element_count:,} elements, backend "
        f"{new.backend}): {', '.join(names)}" + "".join(f"; {tie}" for tie in tied)
    )
    logger.bind(**data).info("{}", printable(text))
    for warning in warnings:
        logger.bind(role=new.role).warning("{}: {}", new.role, warning)


_NUMBER = re.compile(r"(0|[1-9][0-9]*)")  # what str(int) writes: 07 is 0 and 7


def fold(names: Sequence[str]) -> list[str]:
    """Names that differ in numbers alone as one text, such as `layers.{0..3,7}.gate.weight`.

    Nothing is lost: writing out every combination of the numbers in braces gives the names again.
    """
    # The texts between numbers -> for each name that has them, its numbers.
    folded: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        folded.setdefault(tuple(parts[::2]), []).append(tuple(parts[1::2]))
    lines = []
    for texts, rows in folded.items():
        for place in reversed(range(len(texts) - 1)):
            # Rows that agree in all other places become one, with the set of their numbers in this place.
            merged: dict[tuple[Any, ...], set[str]] = {}
            for row in rows:
                merged.setdefault(row[:place] + row[place + 1 :], set()).add(row[place])
            rows = [(*rest[:place], frozenset(values), *rest[place:]) for rest, values in merged.items()]
        for row in rows:
            written = [*(_runs(values) for values in row), ""]
            lines.append("".join(text + number for text, number in zip(texts, written, strict=True)))
    return lines


def _runs(values: frozenset[str]) -> str:
    if len(values) == 1:
        return next(iter(values))
    runs: list[list[int]] = []
    for value in sorted(map(int, values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return "{" + ",".join("..".join(map(str, run)) for run in runs) + "}"
