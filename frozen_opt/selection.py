"""Which parameters of one model a list of patterns selects: names, ties and name maps put together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from torch import nn

from frozen_opt.braces import without_braces
from frozen_opt.errors import FreezeConfigError, listing
from frozen_opt.names import EVERYTHING, Found, Walk, walk
from frozen_opt.patterns import Matcher, Verdict

NameMap = Any
"""A callable from a canonical name to more names, or an object with `megatron_to_hf_lookup(name)`."""


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
            more = self._lookup(found.name)
            names += [found.name, *(more.values() if isinstance(more, Mapping) else more)]
        return names

    def _with_more_names(self, chunks: Sequence[nn.Module]) -> tuple[list[Found], str]:
        aliases: dict[int, list[Found]] = {}
        for found in walk(chunks, EVERYTHING).found:
            aliases.setdefault(id(found.parameter), []).append(found)
        matches, split = [], ""
        for same in aliases.values():
            names = [found.name for found in same]
            try:
                verdict = self._combine({name: self._verdict_on(name) for name in names})
            except FreezeConfigError as error:  # told once it is known that each pattern does something
                split = split or str(error)
                more = [self._lookup(name) for name in names]
                others = [
                    other for each in more for other in (each.values() if isinstance(each, Mapping) else each)
                ]
                verdict = self._matcher.verdict_on(*names, *others)
            if verdict:
                matches.append(same[0]._replace(verdict=verdict, ties=names[1:]))
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

    def _lookup(self, name: str) -> Sequence[str] | Mapping[str, str]:
        if self.name_map is None:
            return ()
        if hasattr(self.name_map, "megatron_to_hf_lookup"):
            mapping = self.name_map.megatron_to_hf_lookup(name)
            more = None if mapping is None else mapping.hf_param
        else:
            more = self.name_map(name)
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
