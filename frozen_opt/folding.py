"""Many names as a few patterns that select exactly these, for the log and for preview."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"(0|[1-9][0-9]*)")  # what str(int) writes: 07 is 0 and 7


def escape(text: str) -> str:
    """The pattern that matches this text alone; no carve-out, though the text begins with `!`."""
    written = re.sub(r"[*?[{}]", r"[\g<0>]", text)
    return "{!}" + written[1:] if written.startswith("!") else written


def fold(names: Sequence[str]) -> list[str]:
    """Names that differ in numbers alone as one pattern, such as `layers.{0..3,7}.gate.weight`.

    Nothing is lost, and nothing added: together the patterns select these names.
    """
    # The texts between numbers -> for each name that has them, its numbers.
    folded: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        folded.setdefault(tuple(parts[::2]), []).append(tuple(parts[1::2]))
    lines = []
    for texts, rows in folded.items():
        for place in reversed(range(len(texts) - 1)):
            # Rows that agree in all other places become one, with the set of their numbers in this place.
            merged: dict[tuple[Any, ...], set[str]] = {}
            for row in rows:
                merged.setdefault(row[:place] + row[place + 1 :], set()).add(row[place])
            rows = [(*rest[:place], frozenset(values), *rest[place:]) for rest, values in merged.items()]
        texts = (escape(texts[0]), *(re.sub(r"[*?[{}]", r"[\g<0>]", text) for text in texts[1:]))
        for row in rows:
            written = [*(_runs(values) for values in row), ""]
            lines.append("".join(text + number for text, number in zip(texts, written, strict=True)))
    return lines


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
