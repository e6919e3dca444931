"""Globs to one automaton: which names does a list of patterns select?

`fnmatch` semantics over the whole name, case-sensitive, and a shell's braces. All patterns of a list run at
once, as one automaton that is built while it is used and remembers each step it took. A model repeats the
same few name components thousands of times, so nearly every step is one dict look-up, and the cost of
matching hardly depends on the number of patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from frozen_opt.errors import FreezeConfigError
from frozen_opt.matching import braces

_LARGEST = 100_000
"""Characters in a list of patterns, braces written out: with more, the automaton gets large."""


def check_patterns(patterns: object, role: str) -> list[str]:
    """The patterns as a list, or an error that says what is wrong with their shape.

    Args:
        patterns: A sequence of non-empty strings, or None for none. A leading `!` makes a carve-out.
        role: Named in the error.

    Raises:
        FreezeConfigError: A string in place of a list, another type, an element that is no string or
            empty, braces that don't fit each other, a carve-out with nothing before it.
    """
    key = f"role {role!r}: the list of patterns (in a config: trainer.{role}.freeze_parameters)"
    if patterns is None:
        return []
    if isinstance(patterns, str | bytes):
        raise FreezeConfigError(
            f"{key} is the string {patterns!r}, and must be a list of patterns: write [{patterns!r}]"
        )
    if not isinstance(patterns, Sequence):
        raise FreezeConfigError(
            f"{key} is a {type(patterns).__name__}, and must be a list of patterns, "
            'such as ["*.mlp.gate.weight"]'
        )
    for pattern in patterns:
        if not isinstance(pattern, str) or pattern in ("", "!"):
            raise FreezeConfigError(
                f"{key} holds {pattern!r}: each pattern must be a non-empty string, "
                'such as "*.mlp.gate.weight"'
            )
    size = 0
    for pattern in patterns:
        try:
            size += braces.count(braces.parse(pattern.removeprefix("!")))
        except ValueError as error:
            raise FreezeConfigError(f"{key} holds {pattern!r}: {error}") from None
    if size > _LARGEST:
        raise FreezeConfigError(
            f"{key} has {size:,} characters, and {_LARGEST:,} at most are taken: write names that differ in "
            "a few places as one glob, or with braces"
        )
    if patterns and patterns[0].startswith("!"):
        raise FreezeConfigError(
            f"{key} starts with the carve-out {patterns[0]!r}, which has nothing to take away from: "
            f'put what to freeze before it, such as ["*", {patterns[0]!r}]'
        )
    return list(patterns)


def is_well_formed(pattern: object) -> bool:
    """Whether it is a pattern that a list may hold."""
    try:
        check_patterns(["*", pattern], "")
    except FreezeConfigError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a list of patterns says of one name that at least one of them matches."""

    selected: bool
    """The last pattern that matches is no carve-out."""
    credited: tuple[int, ...]
    """Patterns (by index) that did something: selected the name, or took it away again."""


T = TypeVar("T")


class _Answers(dict[str, T]):
    """Answers for names, each worked out when it is first looked up."""

    def __init__(self, work_out: Callable[[str], T]) -> None:
        self._work_out = work_out

    def __missing__(self, name: str) -> T:
        self[name] = answer = self._work_out(name)
        return answer


class State:
    """The automaton after some text. What follows is kept, so that a walk looks most of it up."""

    __slots__ = ("after", "bits", "characters", "matcher", "may_end", "verdicts")

    def __init__(self, matcher: Matcher, bits: int) -> None:
        self.matcher = matcher
        self.bits = bits
        self.may_end = matcher.may_end(bits)
        """Whether a pattern may match here with one more component; most modules are asked no further."""
        self.characters: dict[str, State] = {}
        self.after: Mapping[str, State] = _Answers(lambda component: self.read(component + "."))
        """Name of a submodule -> the state after it."""
        self.verdicts: Mapping[str, Verdict | None] = _Answers(
            lambda name: matcher.verdict(self.read(name).bits)
        )
        """Name of a parameter of the module -> what the patterns say of it; None where none matches."""

    def read(self, text: str) -> State:
        """The state after more text, character by character."""
        state = self
        for character in text:
            try:
                state = state.characters[character]
            except KeyError:
                following = self.matcher.after(state.bits, character)
                state.characters[character] = following
                state = following
        return state


@dataclass
class Matcher:
    """A list of patterns, ready to match.

    The states of the automaton are sets of positions within the globs, as the bits of an integer: a set
    bit says that everything left of that position has been read. Reading a character moves each bit past
    its element where that element accepts the character; a bit right after a `*` stays as well. A bit at
    the start of braces goes on to the start of each alternative, one at the end of any of these to what
    follows the braces.
    """

    patterns: Sequence[str]
    start: State = field(init=False)

    def __post_init__(self) -> None:
        self._elements: dict[str, int] = {}  # element -> the positions where it stands
        self._accepted: dict[str, int] = {}  # character -> the positions whose element accepts it
        self._after_stars = 0
        self._jumps: dict[int, int] = {}  # a position at a brace -> those, to its right, that go on from it
        self._sources = 0
        self._ends: list[int] = []  # for each pattern, the bit that says it has matched
        self._last = 0  # the positions from which a pattern may end with no dot in between
        self._states: dict[int, State] = {}
        starts = position = 0
        for pattern in self.patterns:
            starts |= 1 << position
            position = self._lay_out(braces.parse(pattern.removeprefix("!")), position)
            self._ends.append(1 << position)
            position += 1
        self._last = self._before_the_ends()
        self.start = self.state(starts)

    def _lay_out(self, parts: Sequence[braces.Part], position: int) -> int:
        """Give the parts positions from this one on; the position after them."""
        for part in parts:
            if part == "*":
                self._after_stars |= 1 << position
            elif isinstance(part, str):
                self._elements[part] = self._elements.get(part, 0) | 1 << position
                position += 1
            else:
                entry, ends = 1 << position, []
                starts = 0
                for alternative in braces.compact(part):
                    position += 1
                    starts |= 1 << position
                    position = self._lay_out(alternative, position)
                    ends.append(1 << position)
                position += 1
                self._jumps |= {entry: starts, **dict.fromkeys(ends, 1 << position)}
                self._sources |= sum(ends, entry)
        return position

    def _before_the_ends(self) -> int:
        """The positions from which some end is reached over no `.`; at braces perhaps a few too many."""
        dots, reached, more = self._elements.get(".", 0), 0, sum(self._ends)
        while reached != more:
            reached = more
            more |= (reached >> 1) & ~dots
            more |= sum(
                source for source, targets in self._jumps.items() if targets & reached and not source & more
            )
        return reached

    def may_end(self, bits: int) -> bool:
        """Whether a pattern may match a name of which one component is yet to be read."""
        return bool(bits & self._last)

    def verdict_on(self, *names: str) -> Verdict | None:
        """What the patterns say of a parameter with these whole names: each matches by any of them."""
        reached = 0
        for name in names:
            reached |= self.start.read(name).bits
        return self.verdict(reached)

    def state(self, bits: int) -> State:
        pending = bits & self._sources
        while pending:
            source = pending & -pending
            targets = self._jumps[source]
            pending = (pending ^ source) | targets & self._sources & ~bits
            bits |= targets
        if bits not in self._states:
            self._states[bits] = State(self, bits)
        return self._states[bits]

    def after(self, bits: int, character: str) -> State:
        """The state that follows when a character is read."""
        if character not in self._accepted:
            self._accepted[character] = sum(
                positions for element, positions in self._elements.items() if fnmatchcase(character, element)
            )
        return self.state((bits & self._accepted[character]) << 1 | bits & self._after_stars)

    def verdict(self, bits: int) -> Verdict | None:
        selected, credited = False, []
        for index, (pattern, end) in enumerate(zip(self.patterns, self._ends, strict=True)):
            if bits & end:
                carves_out = pattern.startswith("!")
                if selected or not carves_out:
                    credited.append(index)
                selected = not carves_out
        return Verdict(selected, tuple(credited)) if credited else None
