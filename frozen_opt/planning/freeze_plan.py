"""`FreezePlan`: what would be frozen, and the steps from there to a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from torch import nn

from frozen_opt.errors import FreezeConfigError, listing
from frozen_opt.exclusion.proof import Optimizers, prove_excluded, refuse_frozen_before
from frozen_opt.guards.trace import leave_trace
from frozen_opt.matching.names import unwrapped
from frozen_opt.matching.places import Place
from frozen_opt.matching.ways import lead_there
from frozen_opt.parameters import parameters_once
from frozen_opt.planning.collector import without_collector
from frozen_opt.planning.local import Local
from frozen_opt.ranks.agreement import Agreement
from frozen_opt.ranks.collectives import Group
from frozen_opt.reports.freeze_report import Freeze, FreezeReport
from frozen_opt.reports.log import log
from frozen_opt.reports.remembered import record, record_none


class Outcome(NamedTuple):
    """What a factory left behind, or nothing where there was none."""

    optimizers: Optimizers
    untied: Mapping[str, str]
    """Ties that it broke: name of a frozen parameter -> the one that it was tied to, both of them frozen."""
    backend: str
    """Not the one that was planned for, if the factory has wrapped the model."""
    has_optimizer: bool = True
    """Whether there is an optimizer, or may be one later."""
    second: Mapping[str, int] = {}
    """Of which frozen parameters a second network has copies; see `copies`."""


@dataclass(frozen=True)
class FreezePlan(Freeze):
    """What would be frozen. Making one changes nothing; `apply()` freezes."""

    warnings: Sequence[str] = ()
    """What will surprise a user of this freeze, with the remedy."""
    _local: Local | None = field(default=None, repr=False)
    """This rank's share of it; None if the list is empty, and nothing was frozen before."""
    _agreement: Agreement | None = field(default=None, repr=False)
    _tied_elements: Mapping[str, int] = field(default_factory=dict, repr=False)
    _unmatched: str = field(default="", repr=False)
    """The error for what matches nothing in the chunks so far."""
    _group: Group = field(default=None, repr=False)

    @property
    def idle(self) -> bool:
        """The list is empty, and the role has frozen nothing of this model before: all stays as it is."""
        return self._local is None

    def apply(self) -> FreezeReport:
        """Freeze, record and log. Build the optimizer afterwards, from `trainable_parameters(model)`.

        Raises:
            FreezeConfigError: The model's modules are no longer those that this was planned for.
        """
        if self._local is not None:
            _refuse_stale(self._local)
        return self.apply_now()

    def apply_now(self) -> FreezeReport:
        """`apply` for a plan that has just been made."""
        if self._local is None:
            return self.leave_alone([])
        for parameter in _change(self._local):
            parameter.grad = None  # an earlier backward's would still count in clip_grad_norm_
        return self.record(Outcome([], {}, self.backend))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Freeze for good, unless the body raises on some rank: then every rank puts its flags back."""
        assert self._local is not None
        assert self._agreement is not None
        flags: dict[Place, bool] = {}
        try:
            with self._agreement.telling():
                flags |= _flags(self._local)
                for _ in _change(self._local):
                    pass  # gradients stay until nothing can fail any more
                yield
        except BaseException:
            for place, flag in flags.items():
                _set_flag(place, flag)
            raise
        for place in self._local.freezing:
            if (parameter := place()) is not None:
                parameter.grad = None

    def prove(self, optimizers: Optimizers) -> Outcome:
        """Prove that no optimizer holds a frozen parameter, on any rank; see `exclusion`.

        Args:
            optimizers: What the factory built.
        """
        assert self._local is not None
        assert self._agreement is not None
        backend, untied = self.backend, {}
        second: Mapping[str, int] = {}
        if self.patterns:
            planned = {kept.name: place for place, kept in self._local.freezing.items()}
            now = self._local.selector.select(self._local.chunks).whole()
            about = self._local.selector.about
            frozen, backend, second = prove_excluded(self.role, about, planned, now, optimizers)
            untied = {
                other: name
                for name, others in self.ties.items()
                for other in others
                if name in frozen and other in frozen and frozen[other] is not frozen[name]
            }
        else:
            refuse_frozen_before(self.role, optimizers)
        everywhere = self._agreement.share(untied, self.patterns)
        broken = {name: other for there in everywhere for name, other in there.items()}
        return Outcome(optimizers, broken, backend, bool(optimizers), second)

    def leave_traces(self, outcome: Outcome, report: FreezeReport) -> None:
        """Let the states of the optimizers tell this list; see `trace`."""
        assert self._local is not None
        if report.names and outcome.optimizers:
            parameters = parameters_once(self._local.chunks)
            names = {id(parameter): name for name, parameter in parameters.items()}
            for optimizer, _ in outcome.optimizers:
                leave_trace(optimizer, report, names)

    def record(self, outcome: Outcome) -> FreezeReport:
        """Remember and log what is frozen now."""
        assert self._local is not None
        with without_collector():
            report = _report(self, outcome)
            news = record(
                report,
                frozen=self._local.freezing,
                released=self._local.released,
                models=[unwrapped(chunk) for chunk in self._local.chunks],
                optimizers=[optimizer for optimizer, _ in outcome.optimizers],
                unmatched=self._unmatched,
            )
            if news:
                log(report, self.warnings, self._group)
            return report

    def leave_alone(self, optimizers: Optimizers) -> FreezeReport:
        """Record that nothing is frozen, and check that the optimizer holds nothing frozen before."""
        refuse_frozen_before(self.role, optimizers)
        record_none(self.role, [optimizer for optimizer, _ in optimizers])
        report = FreezeReport(self.role)
        log(report, (), self._group)
        return report


def _report(plan: FreezePlan, outcome: Outcome) -> FreezeReport:
    """The plan as it was carried out; the two ends of a broken tie are two parameters."""
    assert plan._local is not None
    untied = outcome.untied
    apart: dict[str, list[str]] = {}
    for name, other in untied.items():
        apart.setdefault(other, []).append(name)
    more_elements = sum(plan._tied_elements[other] for other in untied.values())
    values = {each.name: getattr(plan, each.name) for each in fields(Freeze)} | {
        "backend": outcome.backend,
        "names": tuple(each for name in plan.names for each in (name, *apart.get(name, ())))
        if apart
        else plan.names,
        "element_count": plan.element_count + more_elements,
        "ties": {
            name: rest
            for name, others in plan.ties.items()
            if (rest := tuple(other for other in others if other not in untied))
        },
    }
    return FreezeReport(
        **values,
        untied=untied,
        has_optimizer=outcome.has_optimizer,
        _second=dict(outcome.second),
        _seen=dict.fromkeys(kept.name for kept in plan._local.freezing.values()),
    )


def _refuse_stale(local: Local) -> None:
    if lead_there(local.steps) and not local.thawing:
        return
    places = {**local.freezing, **local.thawing}
    modules = {id(module) for chunk in local.chunks for module in chunk.modules()}
    if gone := [kept.name for place, kept in places.items() if id(place.module) not in modules]:
        raise FreezeConfigError(
            f"{local.selector.about}: since this was planned, the modules of {listing(gone)} were replaced: "
            "plan again"
        )


def _flags(local: Local) -> dict[Place, bool]:
    """The flags of what is to be changed."""
    standing = {place: place() for place in (*local.freezing, *local.thawing)}
    return {place: it.requires_grad for place, it in standing.items() if it is not None}


def _change(local: Local) -> Iterator[nn.Parameter]:
    """Thaw and freeze, and give each parameter as it has been frozen."""
    for place in local.thawing:
        _set_flag(place, True)
    for place in local.freezing:
        if (parameter := place()) is not None:
            parameter.requires_grad = False  # `requires_grad_` takes three times as long
            yield parameter


def _set_flag(place: Place, flag: bool) -> None:
    parameter = place()
    if parameter is not None and (parameter.is_floating_point() or parameter.is_complex() or not flag):
        parameter.requires_grad_(flag)
