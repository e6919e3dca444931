"""From patterns to frozen parameters: decide, agree, freeze, prove, record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from frozen_opt import ranks
from frozen_opt.backends import Backend, choose_backend, find_optimizers, require_optimizers
from frozen_opt.errors import (
    FrozenParameterInOptimizerError,
    NothingTrainableError,
    UnmatchedPatternError,
    UnsupportedBackendError,
    listing,
)
from frozen_opt.names import module_list
from frozen_opt.order import in_model_order
from frozen_opt.patterns import check_patterns
from frozen_opt.report import FreezeReport, Frozen, frozen_elsewhere, optimizers_elsewhere, record
from frozen_opt.selection import NameMap, Selection, Selector, closest_names


class Proof(NamedTuple):
    """What there was to see once a factory had run."""

    optimizers: list[Any]
    frozen: Mapping[str, nn.Parameter]
    """By name. Not those that were planned if the factory has sharded the model."""
    backend: str


@dataclass(frozen=True)
class FreezePlan(Frozen):
    """What would be frozen. Making one changes nothing; `apply()` freezes."""

    # This rank's share of it, and what it takes to look again.
    _selector: Selector | None = None
    _selection: Selection | None = None
    _warnings: Sequence[str] = ()
    _group: ranks.Group = None

    def apply(self) -> FreezeReport:
        """Freeze, record and log. Build the optimizer afterwards, from `trainable_parameters(model)`."""
        self._freeze()
        return self.record()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze for good, unless the body raises on some rank: then every rank puts its flags back."""
        flags = {name: parameter.requires_grad for name, parameter in self._parameters.items()}
        self._freeze()
        error: Exception | None = None
        try:
            try:
                yield
            except Exception as raised:
                error = raised
            ranks.check_together(error, self.role, self.patterns, self._group)
        except BaseException:
            self._put_back(flags)
            raise

    def prove(self, result: object) -> Proof:
        """Prove that no optimizer in `result`, what a factory returned, holds a frozen parameter.

        By identity, and by name: the factory may have put other tensors under the frozen names, when it
        shards the model, say.

        Raises:
            FrozenParameterInOptimizerError: One does, or a name holds a trainable tensor again.
            UnsupportedBackendError: There is no optimizer that can be checked, or the factory has made of
                the model what its backend can't honour.
        """
        optimizers = require_optimizers(result)
        held = {id(parameter) for _, parameters in optimizers for parameter in parameters}
        now = self._select_again()
        current = {name: found.parameter for name, found in now.frozen.items()}
        caught = [
            name
            for name, parameter in self._parameters.items()
            if id(parameter) in held or id(current.get(name)) in held
        ]
        if caught:
            raise FrozenParameterInOptimizerError(
                f"{_about(self)}: the optimizer holds {len(caught)} frozen parameters: {listing(caught)}. "
                "Give it frozen_opt.trainable_parameters(model) in place of model.parameters(). The "
                "requires_grad flags were put back"
            )
        if undone := [name for name, parameter in current.items() if parameter.requires_grad]:
            raise FrozenParameterInOptimizerError(
                f"{_about(self)}: while the optimizer was built, {listing(undone)} became trainable again "
                "(a loading or sharding step registered new parameters, or set requires_grad). Let it do "
                "so before the freeze. The requires_grad flags were put back"
            )
        backend = choose_backend(now.walk)
        if refusal := backend.refusal(now.walk, list(now.frozen.values())):
            raise UnsupportedBackendError(f"{_about(self)}: {refusal}")
        if gone := [name for name in self._parameters if name not in current]:
            raise UnsupportedBackendError(
                f"{_about(self)}: while the optimizer was built, {listing(gone)} went from the model, so "
                "that nothing can be proved about them. Let what replaces modules do so before the freeze"
            )
        if held and held.isdisjoint(map(id, now.walk.parameters)):
            raise UnsupportedBackendError(
                f"{_about(self)}: the optimizer holds none of the model's parameters (copies, perhaps), so "
                "nothing can be proved about it. Teach frozen_opt this optimizer with register_backend"
            )
        prove_apart(self.role, held)
        return Proof([optimizer for optimizer, _ in optimizers], current, backend.name)

    def record(self, proof: Proof | None = None) -> FreezeReport:
        """Remember and log what is frozen now."""
        optimizers, frozen, backend = proof or Proof([], self._parameters, self.backend)
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
        )
        record(
            report,
            frozen=frozen.items(),
            optimizers=optimizers,
            warnings=self._warnings,
            group=self._group,
        )
        return report

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        frozen = self._selection.frozen if self._selection else {}
        return {name: found.parameter for name, found in frozen.items()}

    def _select_again(self) -> Selection:
        assert self._selector is not None
        assert self._selection is not None
        return self._selector.select(self._selection.walk.chunks)

    def _freeze(self) -> None:
        for parameter in self._parameters.values():
            parameter.requires_grad_(False)

    def _put_back(self, flags: Mapping[str, bool]) -> None:
        for name, flag in flags.items():
            self._parameters[name].requires_grad_(flag)
        current = self._select_again().frozen  # the factory may have registered other tensors
        for name, flag in flags.items():
            if name in current:
                current[name].parameter.requires_grad_(flag)


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
    return make_plan(lambda: model, patterns, role=role, name_map=name_map, group=group)


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
    patterns: object,
    *,
    role: str,
    name_map: NameMap = None,
    group: ranks.Group = None,
) -> FreezePlan:
    """`plan_freezing` for a model that is yet to be found: ranks agree on a failure to find it as well."""
    checked = tuple(check_patterns(patterns, role))
    if not checked:
        return FreezePlan(role)
    local: _Local | None = None
    error: Exception | None = None
    try:
        local = _look(find_model(), Selector(role, checked, name_map), group)
    except Exception as raised:
        error = raised
    ranks.check_together(error, role, checked, group)
    assert local is not None
    findings, trainable = ranks.exchange([local.rows, local.warnings], local.trainable, group)
    rows = in_model_order({row[0]: _Row(*row) for found, _ in findings for row in found}, len(findings))
    frozen = [row for row in rows if row.selected]
    credits = Counter(index for row in rows for index in row.credited)
    plan = FreezePlan(
        role=role,
        patterns=checked,
        backend=local.backend.name,
        names=tuple(row.name for row in frozen),
        matches={pattern: credits[index] for index, pattern in enumerate(checked)},
        element_count=sum(row.elements for row in frozen),
        ties={row.name: tuple(row.ties) for row in frozen if row.ties},
        _selector=local.selector,
        _selection=local.selection,
        _warnings=list(dict.fromkeys(text for _, warnings in findings for text in warnings)),
        _group=group,
    )
    if not all(plan.matches.values()):
        raise _unmatched(plan, local)
    if not trainable:
        raise NothingTrainableError(f"{_about(plan)}: {_NOTHING_LEFT}")
    return plan


def prove_apart(role: str, held: set[int]) -> None:
    """Raise if another role has frozen one of the parameters with these ids."""
    for other, name, parameter in frozen_elsewhere(role):
        if id(parameter) in held:
            raise FrozenParameterInOptimizerError(
                f"the optimizer of role {role!r} holds {listing([name])}, which role {other!r} has frozen: "
                f"they share this tensor. Freeze it for {role!r} as well, or leave it trainable for both"
            )


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
    walk, frozen = selection.walk, list(selection.frozen.values())
    backend = choose_backend(walk)
    if refusal := backend.refusal(walk, frozen):
        raise UnsupportedBackendError(f"{_about(selector)}: {refusal}")
    ids = {id(found.parameter): found.name for found in frozen}
    for other, optimizer in optimizers_elsewhere(selector.role):
        shared = [
            ids[id(parameter)]
            for _, held in find_optimizers(optimizer)
            for parameter in held
            if id(parameter) in ids
        ]
        if shared:
            raise FrozenParameterInOptimizerError(
                f"{_about(selector)}: the optimizer of role {other!r} holds {listing(shared)}: the two "
                f"roles share these tensors. Freeze them for {other!r} as well, before its optimizer is built"
            )
    trainable = any(parameter.requires_grad and id(parameter) not in ids for parameter in walk.parameters)
    if not trainable and not backend.idle_ranks:
        raise NothingTrainableError(f"{ranks.place(group)}{_about(selector)}: {_NOTHING_LEFT}")
    counts = backend.element_counts(walk, [found.parameter for found in selection.matches])
    rows = [
        (found.name, found.verdict.selected, count, found.verdict.credited, found.ties)
        for found, count in zip(selection.matches, counts, strict=True)
    ]
    return _Local(selector, selection, backend, rows, backend.warnings(walk, frozen), trainable)


def _unmatched(plan: FreezePlan, local: _Local) -> UnmatchedPatternError:
    names = local.selector.names(local.selection.walk.chunks)
    texts = []
    for pattern, count in plan.matches.items():
        if count:
            continue
        if pattern.startswith("!"):
            texts.append(f"{pattern!r} takes nothing away from what the patterns before it select")
            continue
        # Each rank may hold other names; this error is the only time that they are compared.
        scored = [
            pair for found in ranks.gather(closest_names(pattern, names), plan._group) for pair in found
        ]
        best = dict.fromkeys(name for _, name in sorted(scored, key=lambda pair: -pair[0]))
        texts.append(f"{pattern!r} matches no parameter; the closest names: {listing(list(best)[:3])}")
    return UnmatchedPatternError(
        f"role {plan.role!r}: {'; '.join(texts)}. Patterns are globs over whole names: write "
        f"*.mlp.gate.weight, say. Correct trainer.{plan.role}.freeze_parameters"
    )


def _about(subject: Frozen | Selector) -> str:
    return f"role {subject.role!r}, patterns {list(subject.patterns)}"


_NOTHING_LEFT = "nothing is left to train: freeze less, or leave this role's optimizer out"
