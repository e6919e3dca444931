"""Which parameters of one model a list of patterns selects: names, ties and name maps put together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, cast

from torch import nn

from frozen_opt.braces import without_braces
from frozen_opt.errors import FreezeConfigError, listing
from frozen_opt.names import EVERYTHING, Found, Walk, walk
from frozen_opt.patterns import Matcher, Verdict

NameMap = Any
"""A callable from a canonical name to more names, or Megatron-Bridge's mapping registry or AutoBridge."""


@dataclass
class Selection:
    """What the patterns say of a model."""

    walk: Walk
    matches: list[Found] = field(default_factory=list)
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
    def frozen(self) -> dict[str, Found]:
        """The parameters to freeze, by name, in model order."""
        return {found.name: found for found in self.matches if found.verdict.selected}


@dataclass
class Selector:
    """A role's patterns, ready to select."""

    role: str
    patterns: Sequence[str]
    name_map: NameMap = None

    def __post_init__(self) -> None:
        self._matcher = Matcher(self.patterns)
        self._more_names = None if self.name_map is None else _lookup_in(self.name_map)

    def select(self, chunks: Sequence[nn.Module]) -> Selection:
        """Walk the model once (twice when it has ties or a name map) and ask the patterns.

        Raises:
            FreezeConfigError: Several parameters go by the same name.
        """
        selection = Selection(walk(chunks, self._matcher.start))
        parameters = selection.walk.parameters
        if self.name_map is None and len(set(map(id, parameters))) == len(parameters):
            selection.matches = selection.walk.found
        else:
            selection.matches, selection.split = self._with_more_names(chunks)
        names = [found.name for found in selection.matches]
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
        for found in walk(chunks, EVERYTHING).found:
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
        return FreezeConfigError(f"role {self.role!r}, patterns {list(self.patterns)}: {text}")


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


def closest_names(pattern: str, names: Sequence[str], count: int = 3) -> list[tuple[float, str]]:
    """The names most like a pattern that matches none, best first, with how like they are (0 to 1).

    Of names that differ in numbers alone, only the first is looked at: a model has few kinds of names.
    """
    kinds = {re.sub(r"\d+", "0", name): name for name in reversed(names)}
    literal = re.sub(r"[*?!]|\[[^\]]*\]", "", re.sub(r"\d+", "0", without_braces(pattern)))[:1000]
    scored = []
    for kind, name in kinds.items():
        blocks = SequenceMatcher(None, literal, kind, autojunk=False).get_matching_blocks()
        common = sum(block.size for block in blocks)
        # How much of the pattern's text is there, in few pieces; then how little else is.
        scored.append(
            (common / max(len(literal), 1) - 0.02 * len(blocks) - 0.001 * (len(kind) - common), name)
        )
    return sorted(scored, key=lambda item: -item[0])[:count]
