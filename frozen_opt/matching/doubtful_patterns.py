"""Patterns that are valid globs, and probably not what was meant: regexes, ranges, alternatives in vain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from math import isqrt
from typing import NamedTuple, Protocol

from frozen_opt.errors import listing, printable
from frozen_opt.matching import braces
from frozen_opt.matching.braces import fold
from frozen_opt.matching.patterns import Matcher


class Row(Protocol):
    """A parameter on which the patterns have a say."""

    @property
    def name(self) -> str: ...
    @property
    def credited(self) -> Sequence[int]: ...
    @property
    def ties(self) -> Sequence[str]: ...


def warnings(patterns: Sequence[str], rows: Iterable[Row], *, mapped: bool) -> list[str]:
    """What to tell of patterns that did something: how to write what was probably meant.

    Args:
        patterns: The list, every pattern of which did something.
        rows: For each parameter which patterns, by index, did something to it.
        mapped: A name map gave more names than the rows have, so that alternatives can't be judged.
    """
    said = {index: look_alike(pattern) for index, pattern in enumerate(patterns)}
    doubtful = {index for index, pattern in enumerate(patterns) if said[index] or "{" in pattern}
    names: dict[int, list[str]] = {index: [] for index in doubtful}
    for row in rows if doubtful else ():
        for index in doubtful.intersection(row.credited):
            names[index] += (row.name, *row.ties)
    texts = []
    for index in sorted(doubtful):
        pattern = patterns[index]
        if (doubt := said[index]) is not None:
            verb = "takes away" if pattern.startswith("!") else "selects"
            texts.append(f"{pattern!r} {verb} {listing(fold(names[index]), 3)}: {doubt.text}")
        if not mapped and (idle := list(idle_alternatives(pattern.removeprefix("!"), names[index]))):
            texts.append(
                f"of {pattern!r} these alternatives match no parameter: {printable(', '.join(idle))}"
            )
    return texts


# Spellings of other tools


class LookAlike(NamedTuple):
    """What a pattern says to a glob."""

    text: str
    meant: str | None
    """The pattern that was probably meant, where one pattern can say it."""


def look_alike(pattern: str) -> LookAlike | None:
    """What in a pattern means something else to a regex, to gitignore, or to Python's slices."""
    reasons, written = [], []
    for element in braces.elements(pattern):
        reason, meant = _class(element[1:-1]) if len(element) > 1 else (None, element)
        written.append(element if reason is None else meant)
        if reason is not None:
            reasons.append(f"{element} in a glob is {reason}")
    if re.search(r"\]\{[0-9]+(,[0-9]*)?\}", pattern):
        reasons.append("braces hold alternatives, and don't count: write [0-9][0-9], or {[0-9],[0-9][0-9]}")
        written.append(None)
    if not reasons:
        return None
    text, meant = "; ".join(reasons), None
    if None not in written:
        meant = "".join(part for part in written if part is not None)
        text += f": write {meant!r}"
    return LookAlike(text, meant)


def _class(text: str) -> tuple[str | None, str | None]:
    """Why the inside of `[...]` misleads (None if it does not), and how to write what was meant."""
    sign = text[0] if text[0] in "!^" and len(text) > 1 else ""
    members = text.removeprefix(sign)
    meant = _meant(members)
    if meant is None:
        if sign == "^":
            return f"one character, {members} or ^, and [!{members}] is one that is not {members}", (
                f"[!{members}]"
            )
        return None, None
    if meant == "":
        return "one character of these, no digit of a regex and no index from the end", None
    if sign:
        return f"one character; for all but {meant}, select all and carve out a pattern with {meant}", None
    return "one character of these", meant


def _meant(members: str) -> str | None:
    """What stands in brackets, in braces; '' where a glob has no such thing; None if it is what it seems."""
    if len(members) == 1:
        return None
    if "\\" in members or re.fullmatch(r"-[0-9]+|\[?:\w+:", members):
        return ""
    if match := re.fullmatch(r"(-?[0-9]*):(-?[0-9]*)(?::(-?[0-9]+))?", members):
        first, last, step = match[1] or "0", match[2], match[3]
        if not last or "-" in members or int(last) <= int(first):
            return ""
        return f"{{{first}..{int(last) - 1}{f'..{step}' if step else ''}}}"
    items = [item for item in re.split(r"[\s,;|]+", members) if item]
    ranges = [re.sub(_RANGE, r"\1..\2", item) for item in items]
    if len(items) > 1 or (re.fullmatch(_RANGE, members) and not re.fullmatch(r"[0-9]-[0-9]", members)):
        return f"{{{','.join(ranges)}}}"
    if members.isalnum() and len(set(members)) < len(members):
        return members  # [11]
    return None


_RANGE = r"(?<![^.])([0-9]{1,9})(?:-|:|\.\.+)([0-9]{1,9})(?![^.])"
"""A range that stands between dots, or alone."""


def candidates(pattern: str) -> Iterator[str]:
    """What a pattern that matches nothing was perhaps meant to be, likeliest first."""
    if (doubt := look_alike(pattern)) is not None and doubt.meant is not None:
        yield doubt.meant
    yield pattern + ".*"  # it names a module
    yield re.sub(_RANGE, r"{\1..\2}", pattern)
    sign, glob = pattern[: pattern.startswith("!")], pattern.removeprefix("!")
    glob = re.sub(r"\\d[+*]?|\[0-9\][+*]|\.[+*]\??", "*", glob)
    glob = re.sub(r"\\(.)", r"\1", glob)
    glob = re.sub(r"\((?:\?:)?([^()]*)\)", lambda group: f"{{{group[1].replace('|', ',')}}}", glob)
    glob = glob.removeprefix("^").removesuffix("$")
    for before in ("", "*"):
        for after in ("", "*"):
            yield f"{sign}{before}{glob}{after}"


REGEX = re.compile(r"[\\^$()|+]|^!?\.\*")
"""Signs of a regex in a pattern that matches nothing."""


# Alternatives in vain


def idle_alternatives(glob: str, names: Sequence[str]) -> Iterator[str]:
    """The alternatives in braces without which a glob would match these names all the same.

    Of the outer braces alone, where there are up to a thousand and no more than two `*` in braces; numbers
    are folded. Others are left in peace.

    Args:
        glob: A pattern without its carve-out's `!`.
        names: All names that it matches.
    """
    parts = braces.parse(glob)
    left = {
        place: dict.fromkeys(map(braces.join, part))
        for place, part in enumerate(parts)
        if isinstance(part, braces.Choice) and 1 < len(part) <= 1000 and not glob.startswith("!")
    }
    if sum(map(_stars_within, parts)) > 2:
        return  # a regex might take for ever
    if left:
        _strike_out_what_is_read(parts, left, names)
    for place, texts in left.items():
        _strike_out_what_is_needed(parts, place, texts, names)
        numbers = all(text.isdecimal() for text in texts)
        yield from fold(list(texts)) if numbers else (text or "''" for text in texts)


def _stars_within(part: braces.Part) -> int:
    if isinstance(part, str):
        return 0
    return sum(1 if inner == "*" else _stars_within(inner) for each in part for inner in each)


def _strike_out_what_is_read(
    parts: Sequence[braces.Part], left: dict[int, dict[str, None]], names: Sequence[str]
) -> None:
    """Quickly strike out the alternatives by which a regex, of all ways, reads one of the names."""
    regex = re.compile(_regex(parts), re.DOTALL)
    places = [place for place, part in enumerate(parts) if isinstance(part, braces.Choice)]
    plain = sum(1 for texts in left.values() for text in texts if not re.search(r"[*?[{]", text))
    stride = isqrt(len(names)) + 1  # layer by layer, the last alternative would be seen last
    for name in (name for start in range(stride) for name in names[start::stride]):
        if not plain:
            return
        if (match := regex.fullmatch(name)) is not None:
            for place, text in zip(places, match.groups(), strict=True):
                if text in left.get(place, ()):
                    del left[place][text]
                    plain -= 1


def _strike_out_what_is_needed(
    parts: Sequence[braces.Part], place: int, texts: dict[str, None], names: Sequence[str]
) -> None:
    """Strike out what the regex has missed: what still matches a name when all others are taken away."""

    def only(*some: str) -> Matcher:
        before, after = braces.join(parts[:place]), braces.join(parts[place + 1 :])
        # The first one twice: {} alone, of one that is empty, would be an error.
        return Matcher([f"{before}{{{','.join([*some, some[0]])}}}{after}"])

    pending, patience = iter(names), 20
    while texts and patience:
        matcher = only(*texts)
        name = next((name for name in pending if matcher.verdict_on(name) is not None), None)
        if name is None:
            return
        for text in [text for text in texts if only(text).verdict_on(name) is not None]:
            del texts[text]
        patience -= 1
    texts.clear()  # of a pattern so ambiguous nothing is said


def _regex(parts: Sequence[braces.Part], inner: bool = False) -> str:
    """A regex as fnmatch writes it, linear in time but within braces; with a group for each outer brace."""
    segments = [""]
    for part in parts:
        if part == "*" and not inner:
            segments.append("")
        elif isinstance(part, str):
            literal = len(part) == 1 and part not in "*?"
            segments[-1] += re.escape(part) if literal else translate(part)[4:-3]  # of (?s:...)\Z
        else:
            alternatives = "|".join(_regex(alternative, inner=True) for alternative in braces.compact(part))
            segments[-1] += f"(?:{alternatives})" if inner else f"({alternatives})"
    first, *middle = segments
    last = [f".*{middle.pop()}"] if middle else []
    return "".join([first, *(f"(?>.*?{segment})" for segment in middle), *last])
