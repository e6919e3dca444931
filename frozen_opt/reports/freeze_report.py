"""What a role has frozen, as plain data; what checks it, remembers it and logs it stands elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import nn

from frozen_opt.ranks.collectives import Group

Fingerprint: TypeAlias = Mapping[str, Sequence[int]]
"""Canonical name -> four numbers, each summed over all ranks: hashes of the elements, how many elements
these were, hashes of the elements with their places, and a digest of who holds which part."""


@dataclass(frozen=True)
class Freeze:
    """A role's freeze, as planned or as done. Counts and names are those of all ranks."""

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
class FreezeReport(Freeze):
    """What was frozen for a role."""

    untied: Mapping[str, str] = field(default_factory=dict)
    """Name of a frozen parameter -> the one that it was tied to until the factory ran."""
    has_optimizer: bool = True
    """False where the factory built none."""
    _seen: dict[str, tuple[int, tuple[int, ...]] | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The frozen parameters that this rank holds, and identity and shape of what `verify` found first."""
    _watch: list[Any] = field(default_factory=list, repr=False, compare=False)
    """The one `guards.presence.Watch` by which `verify` looks again, if it has one."""
    _second: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Of which of them a second network in the same optimizer has copies, and how many."""

    @property
    def every_name(self) -> set[str]:
        """The names of the frozen parameters, tied ones under each of theirs."""
        return {*self.names, *(name for others in self.ties.values() for name in others)}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_seen": {}, "_watch": []}  # an identity is that of this process

    def verify(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: object = None,
        *,
        fingerprint: Fingerprint | None = None,
        group: Group = None,
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
        _guards().verify(self, model, optimizer, fingerprint=fingerprint, group=group)

    def fingerprint(
        self, model: nn.Module | Sequence[nn.Module], *, group: Group = None
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
        fingerprint: dict[str, list[int]] = _guards().take_fingerprint(self, model, group=group)
        return fingerprint

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
        state: dict[str, Any] = _guards().report_state(self, model, optimizer)
        return state

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        """Check, before the optimizer's state is loaded, that it was saved under this freeze.

        Compares names: as many others are no match. No collective: every rank has the same names.

        Args:
            saved: What `state_dict` gave then.

        Raises:
            ResumeMismatchError: Other parameters were frozen; `now_trainable` and `now_frozen` name them.
            FreezeConfigError: `saved` is something else, or another role's.
        """
        _guards().check_resume(self, saved)

    def metrics(self, *, prefix: bool = True) -> dict[str, int]:
        """`<role>/frozen_parameter_count` and `<role>/frozen_element_count`.

        Args:
            prefix: False leaves `<role>/` out, for trainers that prefix by themselves.
        """
        counts = {"frozen_parameter_count": self.parameter_count, "frozen_element_count": self.element_count}
        return {f"{self.role}/{name}" if prefix else name: count for name, count in counts.items()}


def _guards() -> Any:
    """The one door from this data to what checks a model against it, which knows it."""
    return import_module("frozen_opt.guards")
