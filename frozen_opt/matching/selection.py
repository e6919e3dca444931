"""Which parameters of one model a list of patterns selects: names, ties and name maps put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any, cast

from torch import nn

from frozen_opt.errors import FreezeConfigError, listing
from frozen_opt.matching.names import Found, Walk, walk
from frozen_opt.matching.patterns import Matcher, Verdict

NameMap = Any
"""A callable from a canonical name to more names, or Megatron-Bridge's mapping registry or AutoBridge."""


@dataclass
class Selection:
    """What the patterns say of a model."""

    walk: Walk
    matched: list[Found] = field(default_factory=list)
    """The parameters on which they have a say, each once."""
    split: str = ""
    """If they select a part of a tied or fused tensor, the text of the error."""

    def whole(self) -> Selection:
        """This, or the error that a tensor is split.

        Raises:
            FreezeConfigError: The patterns select a part of a tied or fused tensor.
        """
        if self.split:
            raise FreezeConfigError(self.split)
        return self

    @property
    def chosen(self) -> list[Found]:
        """The parameters to freeze, in model order."""
        return [found for found in self.matched if found.verdict.selected]


@dataclass
class Selector:
    """A role's patterns, ready to select."""

    role: str
    patterns: Sequence[str]
    name_map: NameMap = None

    @property
    def about(self) -> str:
        """What error texts begin with."""
        return f"role {self.role!r}, patterns {list(self.patterns)}"

    def __post_init__(self) -> None:
        self._matcher = Matcher(self.patterns)
        self._more_names = None if self.name_map is None else _lookup_in(self.name_map)

    def select(self, chunks: Sequence[nn.Module]) -> Selection:
        """Walk the model once (twice when it has ties or a name map) and ask the patterns.

        Raises:
            FreezeConfigError: Several parameters go by the same name.
        """
        selection = Selection(walk(chunks, self._matcher.start))
        if self.name_map is None and not _has_ties(selection.walk):
            selection.matched = selection.walk.found
        else:
            selection.matched, selection.split = self._with_more_names(chunks)
        names = [found.name for found in selection.matched]
        if len(set(names)) < len(names):
            repeated = [name for name, count in Counter(names).items() if count > 1]
            raise self._error(
                f"several parameters go by the same name: {listing(repeated)}. A list of models must be "
                "the chunks of one model; freeze separate models one by one"
            )
        return selection

    def names(self, chunks: Sequence[nn.Module]) -> list[str]:
        """Every name that a pattern might use, those of the name map included."""
        names = []
        for found in walk(chunks).found:
            names += [found.name, *self._others(found.name)]
        return names

    def _with_more_names(self, chunks: Sequence[nn.Module]) -> tuple[list[Found], str]:
        aliases: dict[int, list[Found]] = {}
        for found in walk(chunks).found:
            aliases.setdefault(id(found.parameter), []).append(found)
        matches, split = [], ""
        for first, *ties in aliases.values():
            names = [first.name, *(found.name for found in ties)]
            try:
                verdict = self._combine({name: self._verdict_on(name) for name in names})
            except FreezeConfigError as error:  # told once it is known that each pattern does something
                split = split or str(error)
                others = [other for name in names for other in self._others(name)]
                verdict = self._matcher.verdict_on(*names, *others)
            if verdict:
                mapped = [other for name in names for other in self._mapped(name)]
                matches.append(first._replace(verdict=verdict, ties=ties, mapped=mapped))
        return matches, split

    def _verdict_on(self, name: str) -> Verdict | None:
        """By the canonical name and those that the name map adds, which count as names of one parameter."""
        more = self._lookup(name)
        if not more or not isinstance(more, Mapping):
            return self._matcher.verdict_on(name, *more)
        parts = {part: self._matcher.verdict_on(name, part) for part in more.values()}
        chosen = [part for part, said in parts.items() if said is not None and said.selected]
        if 0 < len(chosen) < len(parts):
            rest = [part for part in parts if part not in chosen]
            raise self._error(
                f"{listing(chosen)} is stored in one tensor ({listing([name])}) with {listing(rest)}, and "
                f"part of a tensor can't be frozen: freeze {listing(rest)} as well, or none of them"
            )
        return _together(parts.values())

    def _mapped(self, name: str) -> list[str]:
        """The names that the name map adds to this one, if they are what the patterns matched."""
        return [other for other in self._others(name) if other != name and self._matcher.verdict_on(other)]

    def _others(self, name: str) -> list[str]:
        more = self._lookup(name)
        return list(more.values() if isinstance(more, Mapping) else more)

    def _lookup(self, name: str) -> Sequence[str] | Mapping[str, str]:
        more = None if self._more_names is None else self._more_names(name)
        if more is None:
            return ()
        return (more,) if isinstance(more, str) else more

    def _combine(self, verdicts: Mapping[str, Verdict | None]) -> Verdict | None:
        said = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
        if not said:
            return None
        selected = [name for name, verdict in said.items() if verdict.selected]
        carved = [name for name, verdict in said.items() if not verdict.selected]
        if selected and carved:
            raise self._error(
                f"{listing(selected)} and {listing(carved)} are one tensor under different names; the "
                "patterns select it under one and carve it out under another: make them agree"
            )
        return _together(said.values())

    def _error(self, text: str) -> FreezeConfigError:
        return FreezeConfigError(f"{self.about}: {text}")


def _has_ties(walked: Walk) -> bool:
    """Whether a parameter on which the patterns have a say has another name, whatever they say of that."""
    # To look among all parameters takes as long as a third of the walk. What stands in two places, itself or
    # its module, has more references than what a fresh module holds.
    (usual,) = _references(walk([nn.Sequential(nn.Linear(1, 1, bias=False, device="meta"))]).found)
    if not walked.repeats and all(usual == counts for counts in _references(walked.found)):
        return False
    ids = {id(found.parameter) for found in walked.found}
    return sum(id(parameter) in ids for parameter in walked.each_parameter()) > len(ids)


def _references(found: Sequence[Found]) -> list[tuple[int, int]]:
    """How many there are to each parameter, and to its module."""
    parameters, owners = [each.parameter for each in found], [each.owner for each in found]
    return list(zip(map(getrefcount, parameters), map(getrefcount, owners), strict=True))


def _lookup_in(name_map: Any) -> Callable[[str], Any]:
    """The name map as a function.

    An AutoBridge of Megatron-Bridge's keeps the bridge of its architecture, and that one makes the registry
    of mappings (megatron.bridge.models.conversion, auto_bridge and mapping_registry).
    """
    bridge = getattr(name_map, "_model_bridge", name_map)
    registry = bridge.mapping_registry() if hasattr(bridge, "mapping_registry") else bridge
    if not hasattr(registry, "megatron_to_hf_lookup"):
        if callable(name_map):
            return cast("Callable[[str], Any]", name_map)
        raise FreezeConfigError(
            f"name_map is a {type(name_map).__module__}.{type(name_map).__qualname__}, and must be a "
            "callable that gets a canonical name, or Megatron-Bridge's AutoBridge or mapping registry"
        )

    def by_registry(name: str) -> Any:
        mapping = registry.megatron_to_hf_lookup(name)
        return None if mapping is None else mapping.hf_param

    return by_registry


def _together(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """One verdict for several that agree."""
    said = [verdict for verdict in verdicts if verdict is not None]
    if not said:
        return None
    credited = {index for verdict in said for index in verdict.credited}
    return Verdict(said[0].selected, tuple(sorted(credited)))
