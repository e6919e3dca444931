"""What this rank finds in its model: what to freeze, what to thaw, and what speaks against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from torch.nn.parameter import is_lazy

from frozen_opt.backends.base import Backend
from frozen_opt.backends.registry import choose_backend
from frozen_opt.errors import UnsupportedBackendError, listing
from frozen_opt.exclusion.proof import refuse_parameters_of_other_optimizers
from frozen_opt.matching.adapters import adapter_warnings
from frozen_opt.matching.names import Found, Step, Walk, module_list
from frozen_opt.matching.places import Place
from frozen_opt.matching.selection import Selection, Selector
from frozen_opt.ranks import collectives
from frozen_opt.reports.remembered import Kept, first_flags, frozen_elsewhere


class Row(NamedTuple):
    """What a rank tells the others of a parameter on which the patterns have a say."""

    name: str
    selected: bool
    elements: int
    credited: Sequence[int]
    ties: Sequence[str]
    mapped: Sequence[str]


@dataclass(frozen=True)
class Local:
    """What this rank finds."""

    selector: Selector
    chunks: Sequence[nn.Module]
    backend: Backend
    freezing: Mapping[Place, Kept]
    """What to freeze."""
    released: Mapping[Place, Kept]
    """What the role had frozen of this model until now, and the list no longer selects."""
    thawing: Mapping[Place, Kept]
    """What of that gets back the flag that it had."""
    steps: Sequence[Step | None]
    """The last steps to what to freeze."""
    rows: Sequence[Row]
    thawed: Sequence[str]
    warnings: Sequence[str]
    split: str
    """The error, if the patterns select a part of a tensor; see `Selection`."""
    stuck: str
    """That this rank has nothing left to train, where its backend can't have that."""
    trainable: bool

    def telling(self) -> list[Any]:
        """What the other ranks are told, as plain data; see `together.Findings`."""
        return [self.rows, self.thawed, self.warnings, self.split, self.stuck, self.trainable]


def look(model: object, selector: Selector, before: Mapping[Place, Kept], group: collectives.Group) -> Local:
    """Ask patterns and backend what they say of the model, and change nothing.

    Args:
        model: The model, or its chunks.
        selector: The role's patterns.
        before: What the role has frozen of this model.
        group: The ranks that agree.

    Raises:
        UnsupportedBackendError: The backend can't honour this freeze, or the model is no module.
        FrozenParameterInOptimizerError: Another role's optimizer holds a matched parameter.
    """
    selection = selector.select(module_list(model))
    walk, chosen = selection.walk, selection.chosen
    _refuse_lazy(selector, walk, chosen)
    backend = choose_backend(walk)
    _refuse(selector, backend.refusal(walk, chosen))
    names = {id(found.parameter): found.name for found in chosen}
    refuse_parameters_of_other_optimizers(selector.role, selector.about, names)
    released = {place: kept for place, kept in before.items() if id(place()) not in names}
    thawing = _to_thaw(selector.role, released)
    thawed = _standing_at(thawing)
    _refuse(selector, backend.thaw_refusal(walk, thawed) if thawed else None)
    trainable = bool(thawed) or any(
        parameter.requires_grad and id(parameter) not in names for parameter in walk.each_parameter()
    )
    tied = any(found.ties for found in chosen)
    standing = [each for found in chosen for each in (found, *found.ties)] if tied else chosen
    stuck = "" if trainable or backend.idle_ranks else f"{collectives.place(group)}{nothing_left(selector)}"
    return Local(
        selector=selector,
        chunks=walk.chunks,
        backend=backend,
        freezing=_to_freeze(standing),
        released=released,
        thawing=thawing,
        steps=[found.step for found in standing],
        rows=_rows(selection, backend),
        thawed=[found.name for found in thawed],
        warnings=[*backend.warnings(walk, chosen), *adapter_warnings(walk, chosen)],
        split=selection.split,
        stuck=stuck,
        trainable=trainable,
    )


def nothing_left(selector: Selector) -> str:
    """The text of NothingTrainableError."""
    return f"{selector.about}: nothing is left to train: freeze less, or leave this role's optimizer out"


def _refuse(selector: Selector, refusal: str | None) -> None:
    if refusal:
        raise UnsupportedBackendError(f"{selector.about}: {refusal}")


def _refuse_lazy(selector: Selector, walk: Walk, chosen: Sequence[Found]) -> None:
    if "torch.nn.modules.lazy.LazyModuleMixin" not in walk.classes:
        return
    if lazy := [found.name for found in chosen if is_lazy(found.parameter)]:
        raise UnsupportedBackendError(
            f"{selector.about}: {listing(lazy)} has no shape yet: run a forward on a batch first, so that "
            "lazy modules know their sizes"
        )


def _to_freeze(standing: Sequence[Found]) -> dict[Place, Kept]:
    flags, make = first_flags(), tuple.__new__  # at half of the usual cost
    return {
        make(Place, (ref(found[3]), found[1])): make(
            Kept, (found[0], flags.get(id(found[2]), found[2].requires_grad))
        )
        for found in standing
    }


def _to_thaw(role: str, released: Mapping[Place, Kept]) -> dict[Place, Kept]:
    elsewhere = frozen_elsewhere(role) if released else set()
    return {place: kept for place, kept in released.items() if kept.flag and id(place()) not in elsewhere}


def _standing_at(places: Mapping[Place, Kept]) -> list[Found]:
    """Each parameter that stands at these places, once."""
    first: dict[int, Found] = {}
    for place, kept in places.items():
        parameter, module = place(), place.module
        if parameter is not None and module is not None:
            first.setdefault(id(parameter), Found(kept.name, place.attribute, parameter, module, None))
    return list(first.values())


def _rows(selection: Selection, backend: Backend) -> list[Row]:
    matched = selection.matched
    counts = backend.element_counts(selection.walk, [found.parameter for found in matched])
    return [
        Row(
            found.name,
            found.verdict.selected,
            count,
            found.verdict.credited,
            [tie.name for tie in found.ties] if found.ties else (),
            found.mapped,
        )
        for found, count in zip(matched, counts, strict=True)
    ]
