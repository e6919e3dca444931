"""From patterns to frozen parameters: decide, agree, freeze, prove, record."""

from __future__ import annotations

import glob
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from frozen_opt import ranks
from frozen_opt.backends import Backend, choose_backend
from frozen_opt.errors import (
    FreezeConfigError,
    NothingTrainableError,
    UnmatchedPatternError,
    UnsupportedBackendError,
    listing,
)
from frozen_opt.exclusion import Proof, prove_excluded, prove_free
from frozen_opt.names import module_list, walk
from frozen_opt.order import in_model_order
from frozen_opt.patterns import check_patterns
from frozen_opt.report import FreezeReport, Frozen, record
from frozen_opt.selection import NameMap, Selection, Selector, closest_names


@dataclass(frozen=True)
class FreezePlan(Frozen):
    """What would be frozen. Making one changes nothing; `apply()` freezes."""

    # This rank's share of it. Weak, or a factory that shards the model would need the memory of both.
    _chunks: Sequence[nn.Module] = field(default=(), repr=False)
    _planned: Sequence[_Planned] = field(default=(), repr=False)
    _selector: Selector | None = field(default=None, repr=False)
    _warnings: Sequence[str] = field(default=(), repr=False)
    _group: ranks.Group = field(default=None, repr=False)

    def apply(self) -> FreezeReport:
        """Freeze, record and log. Build the optimizer afterwards, from `trainable_parameters(model)`.

        Raises:
            FreezeConfigError: The model has other parameters under these names by now.
        """
        return self.record(Proof([], self._freeze(), self.backend))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze for good, unless the body raises on some rank: then every rank puts its flags back."""
        flags = {name: parameter.requires_grad for name, parameter in self._current().items()}
        self._freeze()
        error: BaseException | None = None
        try:
            try:
                yield
            except (KeyboardInterrupt, GeneratorExit):
                raise  # no rank may be left to agree with
            except BaseException as raised:
                error = raised
            ranks.check_together(error, self.role, self.patterns, self._group)
        except BaseException:
            self._put_back(flags)
            raise
        finally:
            error = None  # its traceback holds this frame, and so the model

    def prove(self, result: object) -> Proof:
        """Prove that no optimizer in what a factory returned holds a frozen parameter; see `exclusion`."""
        assert self._selector is not None
        planned = {name: reference() for name, _, reference in self._planned}
        return prove_excluded(self.role, _about(self), planned, self._selector.select(self._chunks), result)

    def record(self, proof: Proof) -> FreezeReport:
        """Remember and log what is frozen now."""
        optimizers, frozen, backend, second = proof
        for parameter in frozen.values():
            parameter.grad = None  # an earlier backward's would still count in clip_grad_norm_
        report = FreezeReport(
            self.role,
            self.patterns,
            backend,
            self.names,
            self.matches,
            self.element_count,
            self.ties,
            _held=dict.fromkeys(frozen),
            _second=dict(second),
        )
        record(
            report,
            frozen=frozen.items(),
            optimizers=optimizers,
            warnings=self._warnings,
            group=self._group,
        )
        return report

    def _current(self) -> dict[str, nn.Parameter]:
        """The planned parameters, if each still stands where it was found."""
        current, gone = {}, []
        for name, owner, reference in self._planned:
            parameter = reference()
            if parameter is None or id(parameter) not in map(id, owner._parameters.values()):
                gone.append(name)
            else:
                current[name] = parameter
        if gone:
            raise FreezeConfigError(
                f"{_about(self)}: since this was planned, other parameters have come in the place of "
                f"{listing(gone)} (the model was sharded, loaded or moved): plan again"
            )
        return current

    def _freeze(self) -> dict[str, nn.Parameter]:
        current = self._current()
        for parameter in current.values():
            parameter.requires_grad_(False)
        return current

    def _put_back(self, flags: Mapping[str, bool]) -> None:
        current = {found.name: found.parameter for found in walk(self._chunks).found}
        for name, _, reference in self._planned:
            for parameter in (reference(), current.get(name)):  # the factory may have registered another
                if parameter is not None and (parameter.is_floating_point() or parameter.is_complex()):
                    parameter.requires_grad_(flags[name])


class _Planned(NamedTuple):
    """A parameter of this rank that is to be frozen."""

    name: str
    owner: nn.Module
    reference: weakref.ref[nn.Parameter]


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
            mapping whose values are the parts of a fused tensor, or None; or an object with
            `megatron_to_hf_lookup(name)`, such as Megatron-Bridge's mapping registry.
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
    return plan_freezing(model, patterns, role=role, name_map=name_map, group=group).apply()


def make_plan(
    find_model: Callable[[], object],
    find_patterns: Callable[[], object],
    *,
    role: str,
    name_map: NameMap = None,
    group: ranks.Group = None,
) -> FreezePlan:
    """`plan_freezing` for a model and patterns that are yet to be found, on all ranks or on none.

    Without patterns nothing is looked for, and no other rank is asked.
    """
    patterns: tuple[str, ...] = ()
    local: _Local | None = None
    error: Exception | None = None
    try:
        patterns = tuple(check_patterns(find_patterns(), role))
        if not patterns:
            return FreezePlan(role)
        local = _look(find_model(), Selector(role, patterns, name_map), group)
    except Exception as raised:
        error = raised
    try:
        ranks.check_together(error, role, patterns, group)
    finally:
        error = None  # its traceback holds this frame, and so the model
    assert local is not None
    findings, trainable = ranks.exchange([local.rows, local.warnings], local.trainable, group)
    rows = in_model_order(_by_name(findings, role), len(findings))
    frozen = [row for row in rows if row.selected]
    credits = Counter(index for row in rows for index in row.credited)
    plan = FreezePlan(
        role=role,
        patterns=patterns,
        backend=local.backend.name,
        names=tuple(row.name for row in frozen),
        matches={pattern: credits[index] for index, pattern in enumerate(patterns)},
        element_count=sum(row.elements for row in frozen),
        ties={row.name: tuple(row.ties) for row in frozen if row.ties},
        _chunks=local.selection.walk.chunks,
        _planned=[
            _Planned(name, found.owner, weakref.ref(found.parameter))
            for name, found in local.selection.frozen.items()
        ],
        _selector=local.selector,
        _warnings=list(dict.fromkeys(text for _, warnings in findings for text in warnings)),
        _group=group,
    )
    if idle := [pattern for index, pattern in enumerate(patterns) if not credits[index]]:
        raise _unmatched(plan, idle, local)
    if not trainable:
        raise NothingTrainableError(f"{_about(plan)}: {_NOTHING_LEFT}")
    return plan


class _Row(NamedTuple):
    """What a rank tells the others of a parameter on which the patterns have a say."""

    name: str
    selected: bool
    elements: int
    credited: Sequence[int]
    ties: Sequence[str]


@dataclass(frozen=True)
class _Local:
    """What this rank finds."""

    selector: Selector
    selection: Selection
    backend: Backend
    rows: Sequence[tuple[Any, ...]]
    """Each the fields of a `_Row`."""
    warnings: Sequence[str]
    trainable: bool


def _look(model: object, selector: Selector, group: ranks.Group) -> _Local:
    selection = selector.select(module_list(model))
    walked, frozen = selection.walk, list(selection.frozen.values())
    if _LAZY in walked.classes and (lazy := [f.name for f in frozen if is_lazy(f.parameter)]):
        raise UnsupportedBackendError(
            f"{_about(selector)}: {listing(lazy)} has no shape yet: run a forward on a batch first, so that "
            "lazy modules know their sizes"
        )
    backend = choose_backend(walked)
    if refusal := backend.refusal(walked, frozen):
        raise UnsupportedBackendError(f"{_about(selector)}: {refusal}")
    ids = {id(found.parameter): found.name for found in frozen}
    prove_free(selector.role, _about(selector), ids)
    trainable = any(parameter.requires_grad and id(parameter) not in ids for parameter in walked.parameters)
    if not trainable and not backend.idle_ranks:
        raise NothingTrainableError(f"{ranks.place(group)}{_about(selector)}: {_NOTHING_LEFT}")
    counts = backend.element_counts(walked, [found.parameter for found in selection.matches])
    rows = [
        (found.name, found.verdict.selected, count, found.verdict.credited, found.ties)
        for found, count in zip(selection.matches, counts, strict=True)
    ]
    return _Local(selector, selection, backend, rows, backend.warnings(walked, frozen), trainable)


def _by_name(findings: Sequence[Any], role: str) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    for found, _ in findings:
        for row in (_Row(*fields) for fields in found):
            known = rows.setdefault(row.name, row)
            if known.elements != row.elements:
                raise FreezeConfigError(
                    f"role {role!r}: {listing([row.name])} has {known.elements} elements on one rank and "
                    f"{row.elements} on another: the ranks don't hold the same model"
                )
    return rows


def _unmatched(plan: FreezePlan, idle: Sequence[str], local: _Local) -> UnmatchedPatternError:
    names = local.selector.names(local.selection.walk.chunks)
    texts = []
    for pattern in idle:
        if pattern.startswith("!"):
            texts.append(f"{pattern!r} takes nothing away from what the patterns before it select")
            continue
        # Each rank may hold other names; this error is the only time that they are compared.
        scored = [
            pair for found in ranks.gather(closest_names(pattern, names), plan._group) for pair in found
        ]
        best = dict.fromkeys(name for _, name in sorted(scored, key=lambda pair: -pair[0]))
        texts.append(f"{pattern!r} matches no parameter; the closest names: {listing(list(best)[:3])}")
        if pattern in best:
            texts.append(f"for the name {pattern!r} itself write {glob.escape(pattern)!r}")
    return UnmatchedPatternError(
        f"role {plan.role!r}: {'; '.join(texts)}. A pattern is a glob over the whole name of a parameter"
    )


def _about(subject: Frozen | Selector) -> str:
    return f"role {subject.role!r}, patterns {list(subject.patterns)}"


_LAZY = "torch.nn.modules.lazy.LazyModuleMixin"
_NOTHING_LEFT = "nothing is left to train: freeze less, or leave this role's optimizer out"
