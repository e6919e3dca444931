"""From patterns to frozen parameters: decide, agree, freeze, prove, record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from frozen_opt import doubts, ranks
from frozen_opt.adapters import adapter_warnings
from frozen_opt.agreement import Agreement
from frozen_opt.backends import Backend, choose_backend
from frozen_opt.errors import (
    FreezeConfigError,
    FreezingError,
    NothingTrainableError,
    UnmatchedPatternError,
    UnsupportedBackendError,
    listing,
)
from frozen_opt.exclusion import Optimizers, prove_apart, prove_excluded, prove_free
from frozen_opt.log import log
from frozen_opt.names import Found, module_list, unwrapped
from frozen_opt.order import in_model_order
from frozen_opt.patterns import check_patterns
from frozen_opt.places import Place
from frozen_opt.report import (
    FreezeReport,
    Frozen,
    Kept,
    first_flags,
    frozen_before,
    frozen_elsewhere,
    has_frozen,
    record,
    record_none,
)
from frozen_opt.resume import parameters_once
from frozen_opt.selection import NameMap, Selection, Selector
from frozen_opt.trace import leave_trace
from frozen_opt.unmatched import unmatched


class Proof(NamedTuple):
    """What there was to see once a factory had run, or nothing where there was none."""

    optimizers: Optimizers
    untied: Mapping[str, str]
    """Ties that it broke: name of a frozen parameter -> the one that it was tied to, both of them frozen."""
    backend: str
    """Not the one that was planned for, if the factory has wrapped the model."""
    built: bool = True
    """Whether there is an optimizer, or may be one later."""
    second: Mapping[str, int] = {}
    """Of which frozen parameters a second network has copies; see `copies`."""


@dataclass(frozen=True)
class FreezePlan(Frozen):
    """What would be frozen. Making one changes nothing; `apply()` freezes."""

    # This rank's share of it, by the place of each parameter: a factory may shard the model.
    _chunks: Sequence[nn.Module] = field(default=(), repr=False)
    _frozen: Mapping[Place, Kept] = field(default_factory=dict, repr=False)
    _released: Mapping[Place, Kept] = field(default_factory=dict, repr=False)
    _thawing: Mapping[Place, Kept] = field(default_factory=dict, repr=False)
    _tied_elements: Mapping[str, int] = field(default_factory=dict, repr=False)
    _selector: Selector | None = field(default=None, repr=False)
    _agreement: Agreement | None = field(default=None, repr=False)
    _warnings: Sequence[str] = field(default=(), repr=False)
    _doubt: str = field(default="", repr=False)
    _group: ranks.Group = field(default=None, repr=False)

    @property
    def idle(self) -> bool:
        """The list is empty, and the role has frozen nothing of this model before: all stays as it is."""
        return self._agreement is None

    def apply(self) -> FreezeReport:
        """Freeze, record and log. Build the optimizer afterwards, from `trainable_parameters(model)`.

        Raises:
            FreezeConfigError: The model's modules are no longer those that this was planned for.
        """
        modules = {id(module) for chunk in self._chunks for module in chunk.modules()}
        places = {**self._frozen, **self._thawing}
        if gone := [kept.name for place, kept in places.items() if id(place.module) not in modules]:
            raise FreezeConfigError(
                f"{_about(self)}: since this was planned, the modules of {listing(gone)} were replaced: plan "
                "again"
            )
        return self.apply_now()

    def apply_now(self) -> FreezeReport:
        """`apply` for a plan that has just been made."""
        if self.idle:
            return self.leave_alone([])
        self._change()
        return self.record(Proof([], {}, self.backend))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze for good, unless the body raises on some rank: then every rank puts its flags back."""
        assert self._agreement is not None
        flags: dict[Place, bool] = {}
        try:
            with self._agreement.telling():
                flags |= self._flags()
                self._change()
                yield
        except BaseException:
            for place, flag in flags.items():
                _set_flag(place, flag)
            raise

    def prove(self, optimizers: Optimizers) -> Proof:
        """Prove that no optimizer holds a frozen parameter, on any rank; see `exclusion`.

        Args:
            optimizers: What the factory built.
        """
        assert self._selector is not None
        assert self._agreement is not None
        backend, untied = self.backend, {}
        second: Mapping[str, int] = {}
        if self.patterns:
            planned = {kept.name: place for place, kept in self._frozen.items()}
            now = self._selector.select(self._chunks).whole()
            frozen, backend, second = prove_excluded(self.role, _about(self), planned, now, optimizers)
            untied = {
                other: name
                for name, others in self.ties.items()
                for other in others
                if name in frozen and other in frozen and frozen[other] is not frozen[name]
            }
        else:
            prove_apart(self.role, {id(tensor) for _, held in optimizers for tensor in held})
        everywhere = self._agreement.share(untied, self.patterns)
        broken = {name: other for found in everywhere for name, other in found.items()}
        return Proof(optimizers, broken, backend, bool(optimizers), second)

    def leave_traces(self, proof: Proof, report: FreezeReport) -> None:
        """Let the states of the optimizers tell this list; see `trace`."""
        if report.names and proof.optimizers:
            names = {id(parameter): name for name, parameter in parameters_once(self._chunks).items()}
            for optimizer, _ in proof.optimizers:
                leave_trace(optimizer, report, names)

    def record(self, proof: Proof) -> FreezeReport:
        """Remember and log what is frozen now."""
        for place in self._frozen:
            if (parameter := place()) is not None:
                parameter.grad = None  # an earlier backward's would still count in clip_grad_norm_
        report = self._report(proof)
        news = record(
            report,
            frozen=self._frozen,
            released=self._released,
            models=[unwrapped(chunk) for chunk in self._chunks],
            optimizers=[optimizer for optimizer, _ in proof.optimizers],
            doubt=self._doubt,
        )
        if news:
            log(report, self._warnings, self._group)
        return report

    def leave_alone(self, optimizers: Optimizers) -> FreezeReport:
        """Record that nothing is frozen, and check that the optimizer holds nothing frozen before."""
        prove_apart(self.role, {id(tensor) for _, held in optimizers for tensor in held})
        record_none(self.role, [optimizer for optimizer, _ in optimizers])
        report = FreezeReport(self.role)
        log(report, (), self._group)
        return report

    def _report(self, proof: Proof) -> FreezeReport:
        untied = proof.untied
        values = {each.name: getattr(self, each.name) for each in fields(Frozen)}
        apart: dict[str, list[str]] = {}
        for name, other in untied.items():
            apart.setdefault(other, []).append(name)
        return FreezeReport(
            **values
            | {
                "backend": proof.backend,
                "names": tuple(each for name in self.names for each in (name, *apart.get(name, ()))),
                "element_count": self.element_count
                + sum(map(self._tied_elements.__getitem__, untied.values())),
                "ties": {
                    name: rest
                    for name, others in self.ties.items()
                    if (rest := tuple(other for other in others if other not in untied))
                },
            },
            untied=untied,
            has_optimizer=proof.built,
            _second=dict(proof.second),
            _seen={kept.name: None for kept in self._frozen.values()},
        )

    def _flags(self) -> dict[Place, bool]:
        """The flags of what is to be changed."""
        standing = {place: place() for place in (*self._frozen, *self._thawing)}
        return {place: it.requires_grad for place, it in standing.items() if it is not None}

    def _change(self) -> None:
        for flag, places in ((False, self._frozen), (True, self._thawing)):
            for place in places:
                _set_flag(place, flag)


def _set_flag(place: Place, flag: bool) -> None:
    parameter = place()
    if parameter is not None and (parameter.is_floating_point() or parameter.is_complex() or not flag):
        parameter.requires_grad_(flag)


def plan_freezing(
    model: nn.Module | Sequence[nn.Module],
    patterns: Sequence[str] | None,
    *,
    role: str,
    name_map: NameMap = None,
    group: ranks.Group = None,
) -> FreezePlan:
    """Decide what to freeze, on all ranks together, and change nothing.

    Args:
        model: A module, wrapped or not, or Megatron's list of chunks.
        patterns: `fnmatch` globs over whole canonical names; the last that matches wins, and a leading `!`
            takes away what those before it selected.
        role: `policy`, `critic`, or any other name.
        name_map: More names for each canonical one: a callable that returns a name, several names, a
            mapping whose values are the parts of a fused tensor, or None; or Megatron-Bridge's AutoBridge or
            mapping registry.
        group: The ranks that agree; all by default. Each of them must call.

    Raises:
        FreezeConfigError: The patterns have the wrong shape, differ across ranks, or split a tensor.
        UnmatchedPatternError: A pattern matches nothing on any rank.
        UnsupportedBackendError: The backend can't honour this freeze, or the model is no module.
        FrozenParameterInOptimizerError: Another role's optimizer holds a matched parameter.
        NothingTrainableError: Nothing would be left to train.
    """
    return make_plan(lambda: model, lambda: patterns, role=role, name_map=name_map, group=group)


def freeze_parameters(
    model: nn.Module | Sequence[nn.Module],
    patterns: Sequence[str] | None,
    *,
    role: str,
    name_map: NameMap = None,
    group: ranks.Group = None,
) -> FreezeReport:
    """Freeze at once, where no optimizer factory is at hand: `plan_freezing(...).apply()`.

    Arguments and errors are those of `plan_freezing`.
    """
    return plan_freezing(model, patterns, role=role, name_map=name_map, group=group).apply_now()


def make_plan(
    find_model: Callable[[], object],
    find_patterns: Callable[[], object],
    *,
    role: str,
    name_map: NameMap = None,
    group: ranks.Group = None,
    more_to_come: bool = False,
) -> FreezePlan:
    """`plan_freezing` for a model and patterns that are yet to be found, on all ranks or on none.

    Without patterns, and with nothing of the model frozen before, no other rank is asked.

    Args:
        find_model: Gives the model, or its chunks.
        find_patterns: Gives the list.
        role: As in `plan_freezing`.
        name_map: As in `plan_freezing`.
        group: As in `plan_freezing`.
        more_to_come: The model may have more chunks than these, in which what matches nothing here matches.
    """
    agreement = Agreement(role, group)
    with agreement.telling():
        patterns = tuple(check_patterns(find_patterns(), role))
        model: Any = None
        before: Mapping[Place, Kept] | None = None
        with nullcontext() if patterns else suppress(FreezingError):  # an empty list needs no model
            if patterns or has_frozen(role):
                model = find_model()
                before = frozen_before(role, model)
        if not patterns and before is None:
            agreement.pass_by()
            return FreezePlan(role, _group=group)
        local = _look(model, Selector(role, patterns, name_map), before or {}, group)
    finding = [local.rows, local.thawed, local.warnings, local.split, local.stuck, local.trainable]
    findings = agreement.share(finding, patterns)
    plan, idle = _merge(local, findings, agreement, group)
    doubt = ""
    if idle:
        chunks = local.selection.walk.chunks
        share = partial(agreement.share, patterns=patterns)
        doubt = unmatched(role, idle, local.selector.names(chunks), chunks, share)
    if doubt and not more_to_come:
        raise UnmatchedPatternError(doubt)
    # After that: the carve-out that would have left something to train may be one that is mistyped.
    if split := next((text for *_, text, _, _ in findings if text), ""):
        raise FreezeConfigError(split)
    stuck = next((text for *_, text, _ in findings if text), "")
    if not more_to_come and (stuck or not any(trainable for *_, trainable in findings)):
        raise NothingTrainableError(stuck or f"{_about(plan)}: {_NOTHING_LEFT}")
    return replace(plan, _doubt=doubt)


class _Row(NamedTuple):
    """What a rank tells the others of a parameter on which the patterns have a say."""

    name: str
    selected: bool
    elements: int
    credited: Sequence[int]
    ties: Sequence[str]
    mapped: Sequence[str]


@dataclass(frozen=True)
class _Local:
    """What this rank finds."""

    selector: Selector
    selection: Selection
    backend: Backend
    frozen: Mapping[Place, Kept]
    released: Mapping[Place, Kept]
    thawing: Mapping[Place, Kept]
    rows: Sequence[_Row]
    thawed: Sequence[str]
    warnings: Sequence[str]
    split: str
    """What the patterns select a part of, though it is one tensor; see `Selection`."""
    stuck: str
    """That this rank has nothing left to train, where its backend can't have that."""
    trainable: bool


def _look(
    model: object,
    selector: Selector,
    before: Mapping[Place, Kept],
    group: ranks.Group,
) -> _Local:
    selection = selector.select(module_list(model))
    walked, chosen = selection.walk, list(selection.frozen.values())
    if _LAZY in walked.classes and (lazy := [f.name for f in chosen if is_lazy(f.parameter)]):
        raise UnsupportedBackendError(
            f"{_about(selector)}: {listing(lazy)} has no shape yet: run a forward on a batch first, so that "
            "lazy modules know their sizes"
        )
    backend = choose_backend(walked)
    if refusal := backend.refusal(walked, chosen):
        raise UnsupportedBackendError(f"{_about(selector)}: {refusal}")
    ids = {id(found.parameter): found.name for found in chosen}
    prove_free(selector.role, _about(selector), ids)
    flags = first_flags()
    frozen = {
        each.place: Kept(each.name, flags.get(id(each.parameter), each.parameter.requires_grad))
        for found in chosen
        for each in (found, *found.ties)
    }
    released = {place: kept for place, kept in before.items() if id(place()) not in ids}
    elsewhere = frozen_elsewhere(selector.role) if released else set()
    thawing = {place: kept for place, kept in released.items() if kept.flag and id(place()) not in elsewhere}
    thawed = _found_at(thawing)
    if refusal := backend.thaw_refusal(walked, thawed) if thawed else None:
        raise UnsupportedBackendError(f"{_about(selector)}: {refusal}")
    trainable = bool(thawed) or any(
        parameter.requires_grad and id(parameter) not in ids for parameter in walked.parameters
    )
    stuck = ""
    if not (trainable or backend.idle_ranks):
        stuck = f"{ranks.place(group)}{_about(selector)}: {_NOTHING_LEFT}"
    counts = backend.element_counts(walked, [found.parameter for found in selection.matches])
    rows = [
        _Row(
            found.name,
            found.verdict.selected,
            count,
            found.verdict.credited,
            [tie.name for tie in found.ties],
            found.mapped,
        )
        for found, count in zip(selection.matches, counts, strict=True)
    ]
    return _Local(
        selector=selector,
        selection=selection,
        backend=backend,
        frozen=frozen,
        released=released,
        thawing=thawing,
        rows=rows,
        thawed=[found.name for found in thawed],
        warnings=[*backend.warnings(walked, chosen), *adapter_warnings(walked, chosen)],
        split=selection.split,
        stuck=stuck,
        trainable=trainable,
    )


def _found_at(places: Mapping[Place, Kept]) -> list[Found]:
    """Each parameter that stands at these places, once."""
    first: dict[int, Found] = {}
    for place, kept in places.items():
        parameter, module = place(), place.module
        if parameter is not None and module is not None:
            first.setdefault(id(parameter), Found(kept.name, place.attribute, parameter, module, None))
    return list(first.values())


def _merge(
    local: _Local, findings: Sequence[Any], agreement: Agreement, group: ranks.Group
) -> tuple[FreezePlan, list[str]]:
    """The plan of all ranks together, and the patterns that match nothing on any of them."""
    selector = local.selector
    rows = in_model_order(_by_name(findings, selector.role), len(findings))
    frozen = [row for row in rows if row.selected]
    credits = Counter(index for row in rows for index in row.credited)
    idle = [pattern for index, pattern in enumerate(selector.patterns) if not credits[index]]
    plan = FreezePlan(
        role=selector.role,
        patterns=tuple(selector.patterns),
        backend=local.backend.name,
        names=tuple(row.name for row in frozen),
        matches={pattern: credits[index] for index, pattern in enumerate(selector.patterns)},
        element_count=sum(row.elements for row in frozen),
        ties={row.name: tuple(row.ties) for row in frozen if row.ties},
        mapped={row.name: tuple(row.mapped) for row in frozen if row.mapped},
        thawed=tuple(_distinct(name for _, thawed, *_ in findings for name in thawed)),
        _chunks=local.selection.walk.chunks,
        _frozen=local.frozen,
        _released=local.released,
        _thawing=local.thawing,
        _tied_elements={row.name: row.elements for row in frozen if row.ties},
        _selector=selector,
        _agreement=agreement,
        _warnings=[
            *_distinct(text for _, _, warnings, *_ in findings for text in warnings),
            *doubts.warnings(selector.patterns, rows, mapped=selector.name_map is not None),
        ],
        _group=group,
    )
    return plan, idle


def _distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _by_name(findings: Sequence[Any], role: str) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    for found, *_ in findings:
        for row in (_Row(*row) for row in found):
            known = rows.setdefault(row.name, row)
            if known.elements != row.elements:
                raise FreezeConfigError(
                    f"role {role!r}: {listing([row.name])} has {known.elements} elements on one rank and "
                    f"{row.elements} on another: the ranks don't hold the same model"
                )
    return rows


def _about(subject: Frozen | Selector) -> str:
    return f"role {subject.role!r}, patterns {list(subject.patterns)}"


_LAZY = "torch.nn.modules.lazy.LazyModuleMixin"
_NOTHING_LEFT = "nothing is left to train: freeze less, or leave this role's optimizer out"
