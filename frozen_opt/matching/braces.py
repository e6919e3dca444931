"""Patterns in their parts: what a shell's braces stand for, and many names folded into a few braces.

`layers.{8..11}.{q,k}_proj` has one part for each brace, so that a matcher need not hold the 4 x 2 globs. A
range and a list mix (`{0..3,7}`), braces nest, and within `[...]` a brace is a character like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_letters, digits
from typing import TypeAlias, Union

Part: TypeAlias = Union[str, "Choice"]
"""`*`, `?`, a class such as `[!a-z]`, another character; or braces."""


class Choice(list[list[Part]]):
    """The alternatives of one pair of braces, each in its parts."""


# One element of a glob, split where fnmatch splits: a class such as [!a-z] or []x], else one character.
# The possessive "+" keep fnmatch's rule that a "]" right after "[" or "[!" is a member of the class.
_ELEMENT = re.compile(r"\[!?+\]?+[^\]]*+\]|.", re.DOTALL)
_RANGE = re.compile(r"([0-9]{1,99})\.\.([0-9]{1,99})(?:\.\.([0-9]{1,99}))?")
_LARGEST = 10_000
_DEEPEST = 20


def elements(glob: str) -> list[str]:
    """The glob in its elements, braces and commas among them."""
    return _ELEMENT.findall(glob)


def parse(glob: str) -> list[Part]:
    """The parts of a glob, its carve-out's `!` taken off.

    Raises:
        ValueError: Its braces are unbalanced or mean nothing; the text says what to write.
    """
    parts, end = _until(iter(elements(glob)), depth=0)
    if end:
        raise ValueError(_UNBALANCED)
    return parts


def _until(rest: Iterator[str], depth: int) -> tuple[list[Part], str]:
    """Parts up to the end of an alternative, and the element that ends it; '' at the end of the glob."""
    parts: list[Part] = []
    for element in rest:
        if element == "{":
            parts.append(_choice(rest, depth + 1))
        elif element == "}" or (element == "," and depth):
            return parts, element
        else:
            parts.append(element)
    return parts, ""


def _choice(rest: Iterator[str], depth: int) -> Choice:
    if depth > _DEEPEST:
        raise ValueError(f"it has braces within braces, more than {_DEEPEST} deep")
    choice, end = Choice(), ","
    while end == ",":
        parts, end = _until(rest, depth)
        if not end:
            raise ValueError(_UNBALANCED)
        choice += _alternatives(parts)
    if choice == [[]]:
        raise ValueError("the braces {} hold nothing: write {q,k,v} or {0..3}")
    return choice


def _alternatives(parts: list[Part]) -> list[list[Part]]:
    """What stands between two commas: itself, or all numbers of a range."""
    text = "".join(part if isinstance(part, str) else "{}" for part in parts)
    if " " in text:
        raise ValueError(f"{text!r} in braces has a space, which no name has: write {{q,k,v}}")
    if match := re.fullmatch(r"([0-9]+)(-|:)([0-9]+)", text):
        first, last = int(match[1]), int(match[3]) - (match[2] == ":")
        raise ValueError(f"{text!r} in braces is no range: write {{{first}..{last}}}")
    if ".." not in text:
        return [parts]
    match = _RANGE.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} in braces is no range: a range goes from number to number, {{0..3}}")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1) or 1
    if abs(last - first) // step >= _LARGEST:
        raise ValueError(f"{text!r} in braces is more than {_LARGEST:,} numbers")
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    padded = any(len(end) > 1 and end[0] == "0" for end in match.group(1, 2))
    width = max(map(len, match.group(1, 2))) if padded else 0
    return [list(f"{number:0{width}}") for number in numbers]


_UNBALANCED = "its braces { } are unbalanced: for a brace as such write [{] or [}]"


def compact(choice: Choice) -> list[list[Part]]:
    """The alternatives, numbers that differ in the last digit alone as one: 10 to 12 as `1[012]`."""
    digits: dict[str, str] = {}
    others: list[list[Part]] = []
    for parts in choice:
        text = "".join(part if isinstance(part, str) else "{" for part in parts)
        if text.isdecimal():
            digits[text[:-1]] = digits.get(text[:-1], "") + text[-1]
        else:
            others.append(parts)
    return others + [[*start, f"[{last}]"] for start, last in digits.items()]


def count(parts: Sequence[Part]) -> int:
    """How many characters and the like a matcher has to hold for these parts."""
    return sum(1 if isinstance(part, str) else sum(count(each) + 1 for each in part) for part in parts)


def join(parts: Sequence[Part]) -> str:
    """The parts as one glob, with as many braces as they have."""
    return "".join(part if isinstance(part, str) else "{" + ",".join(map(join, part)) + "}" for part in parts)


def without_braces(glob: str) -> str:
    """The glob with the first alternative of each of its braces: one of those that it stands for."""

    def first(parts: Sequence[Part]) -> str:
        return "".join(part if isinstance(part, str) else first(part[0]) for part in parts)

    return first(parse(glob))


# Names to patterns

_NUMBER = re.compile(r"(0|[1-9][0-9]*)")  # what str(int) writes: 07 is 0 and 7
_NO_DIGITS = ascii_letters + "._"


def escape(text: str) -> str:
    """The pattern that matches this text alone; no carve-out, though the text begins with `!`."""
    written = re.sub(r"[*?[{}]", r"[\g<0>]", text)
    return "{!}" + written[1:] if written.startswith("!") else written


def fold(names: Sequence[str]) -> list[str]:
    """Names that differ in numbers alone as one pattern, such as `layers.{0..3,7}.gate.weight`.

    Nothing is lost, and nothing added: together the patterns select these names.
    """
    # The texts between numbers -> for the names that have them, the numbers in each place.
    folded: dict[tuple[str, ...], list[tuple[frozenset[str], ...]]] = {}
    for (head, tail), last in _by_last_number(names).items():
        parts = _NUMBER.split(head)
        between, numbers = parts[::2], [frozenset([number]) for number in parts[1::2]]
        if tail is not None:
            between.append(tail)
            numbers.append(frozenset(last))
        folded.setdefault(tuple(between), []).append(tuple(numbers))
    lines = []
    for texts, rows in folded.items():
        for place in reversed(range(len(texts) - 1)):
            # Rows that agree in all other places become one, with the set of their numbers in this place.
            merged: dict[tuple[frozenset[str], ...], set[str]] = {}
            for one in rows:
                merged.setdefault(one[:place] + one[place + 1 :], set()).update(one[place])
            rows = [(*rest[:place], frozenset(values), *rest[place:]) for rest, values in merged.items()]
        texts = (escape(texts[0]), *(re.sub(r"[*?[{}]", r"[\g<0>]", text) for text in texts[1:]))
        for one in rows:
            written = [*(_runs(values) for values in one), ""]
            lines.append("".join(text + number for text, number in zip(texts, written, strict=True)))
    return lines


def _by_last_number(names: Iterable[str]) -> dict[tuple[str, str | None], set[str]]:
    """What stands before and after the last number -> the numbers there; nothing after, if there is none.

    Without a regex: a large model has names by the ten thousand that differ there alone.
    """
    found: dict[tuple[str, str | None], set[str]] = {}
    for name in names:
        body = name.rstrip(_NO_DIGITS)
        run = body[len(body.rstrip(digits)) :]
        if run:
            number = run.lstrip("0") or "0"
            key = (body[: -len(number)], name[len(body) :])
            found.setdefault(key, set()).add(number)
        else:
            found[name, None] = set()
    return found


def _runs(values: frozenset[str]) -> str:
    if len(values) == 1:
        return next(iter(values))
    runs: list[list[int]] = []
    for value in sorted(map(int, values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return "{" + ",".join("..".join(map(str, run)) for run in runs) + "}"
