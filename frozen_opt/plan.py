"""From patterns to a plan: find model and list, look, agree with the other ranks, refuse.

What follows stands in `planning.freeze_plan`: freeze, prove, record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from frozen_opt.errors import FreezingError, UnmatchedPatternError
from frozen_opt.matching.patterns import check_patterns
from frozen_opt.matching.selection import NameMap, Selector
from frozen_opt.matching.unmatched import unmatched
from frozen_opt.planning.collector import without_collector
from frozen_opt.planning.freeze_plan import FreezePlan
from frozen_opt.planning.local import Local, look
from frozen_opt.planning.together import Together, put_together
from frozen_opt.ranks.agreement import Agreement
from frozen_opt.ranks.collectives import Group
from frozen_opt.reports.freeze_report import FreezeReport
from frozen_opt.reports.remembered import frozen_before, has_frozen


def plan_freezing(
    model: nn.Module | Sequence[nn.Module],
    patterns: Sequence[str] | None,
    *,
    role: str,
    name_map: NameMap = None,
    group: Group = None,
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
    group: Group = None,
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
    group: Group = None,
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
        model, before = _model_and_memory(find_model, role, needed=bool(patterns))
        if not patterns and before is None:
            agreement.pass_by()
            return FreezePlan(role, _group=group)
        with without_collector():
            local = look(model, Selector(role, patterns, name_map), before or {}, group)
    together = put_together(local.selector, agreement.share(local.telling(), patterns))
    nothing_matches = _unmatched(local, together, partial(agreement.share, patterns=patterns))
    if nothing_matches and not more_to_come:
        raise UnmatchedPatternError(nothing_matches)
    together.refuse(more_to_come=more_to_come)
    plan = _plan(local, together)
    return replace(plan, _agreement=agreement, _unmatched=nothing_matches, _group=group)


def _model_and_memory(find_model: Callable[[], object], role: str, *, needed: bool) -> tuple[object, Any]:
    """The model, and what the role has frozen of it; neither where they are not needed."""
    model: object = None
    before = None
    if needed or has_frozen(role):
        with nullcontext() if needed else suppress(FreezingError):  # an empty list needs no model
            model = find_model()
            before = frozen_before(role, model)
    return model, before


def _unmatched(local: Local, together: Together, share: Callable[[Any], list[Any]]) -> str:
    if not together.idle:
        return ""
    chunks = local.chunks
    return unmatched(together.selector.role, together.idle, local.selector.names(chunks), chunks, share)


def _plan(local: Local, together: Together) -> FreezePlan:
    frozen = [row for row in together.rows if row.selected]
    patterns = together.selector.patterns
    return FreezePlan(
        role=together.selector.role,
        patterns=tuple(patterns),
        backend=local.backend.name,
        names=tuple(row.name for row in frozen),
        matches={pattern: together.credits[index] for index, pattern in enumerate(patterns)},
        element_count=sum(row.elements for row in frozen),
        ties={row.name: tuple(row.ties) for row in frozen if row.ties},
        mapped={row.name: tuple(row.mapped) for row in frozen if row.mapped},
        thawed=tuple(together.thawed),
        warnings=together.warnings,
        _local=local,
        _tied_elements={row.name: row.elements for row in frozen if row.ties},
    )
