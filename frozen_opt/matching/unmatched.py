"""The error for patterns that do nothing: what is closest, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

from torch import nn

from frozen_opt.errors import listing
from frozen_opt.matching.braces import escape, without_braces
from frozen_opt.matching.doubtful_patterns import REGEX, candidates
from frozen_opt.matching.names import walk
from frozen_opt.matching.patterns import Matcher, is_well_formed

_SHOWN = 10


def unmatched(
    role: str,
    idle: Sequence[str],
    names: Sequence[str],
    chunks: Sequence[nn.Module],
    share: Callable[[Any], list[Any]],
) -> str:
    """The text of the error that names every pattern which does nothing on any rank.

    Each rank may hold other names; this error is the only time that they are compared.

    Args:
        role: The role.
        idle: Its patterns that matched nothing, or took nothing away.
        names: All names of this rank that a pattern might use.
        chunks: The model, for the names of its buffers.
        share: Gives what all ranks know for what this one knows; all of them call.
    """
    split = [name.split(".") for name in names]
    buffers = [name.split(".") for name in buffer_names(chunks)]
    findings = share([_find(pattern, names, split, buffers) for pattern in idle[:_SHOWN]])
    texts = [_tell(pattern, found) for pattern, *found in zip(idle, *findings, strict=False)]
    if len(idle) > _SHOWN:
        texts.append(f"{len(idle) - _SHOWN} more patterns match nothing")
    return f"role {role!r}: {'; '.join(texts)}. A pattern is a glob over the whole name of a parameter"


def buffer_names(chunks: Sequence[nn.Module]) -> list[str]:
    """The canonical names of the model's buffers."""
    return [
        prefix + name
        for prefix, module in walk(chunks).buffered
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


Names = list[list[str]]
"""Names in their components."""


def _find(pattern: str, names: Sequence[str], split: Names, buffers: Names) -> dict[str, Any]:
    """What this rank knows of a pattern."""
    meant = (each for each in dict.fromkeys(candidates(pattern)) if each != pattern and is_well_formed(each))
    return {
        "matches": any(_matching(pattern, split)),
        "closest": closest_names(pattern, names),
        "meant": next((each for each in meant if any(_matching(each, split))), None),
        "buffers": list(islice(_matching(pattern, buffers), 3)),
    }


def _matching(pattern: str, names: Names) -> Iterator[str]:
    start = Matcher([pattern.removeprefix("!")]).start
    for parents, name in ((parts[:-1], parts[-1]) for parts in names):
        state = start
        for parent in parents:
            state = state.after[parent]
        if state.verdicts[name] is not None:
            yield ".".join([*parents, name])


def _tell(pattern: str, told: Sequence[dict[str, Any]]) -> str:
    carves_out = pattern.startswith("!")
    if carves_out and any(each["matches"] for each in told):
        return f"{pattern!r} takes nothing away from what the patterns before it select"
    best = [pair for each in told for pair in each["closest"]]
    closest = list(dict.fromkeys(name for _, name in sorted(best, key=lambda pair: -pair[0])))[:3]
    text = (
        f"{pattern!r} {'takes nothing away: it ' * carves_out}matches no parameter; "
        f"the closest names: {listing(closest)}"
    )
    if buffers := [name for each in told for name in each["buffers"]]:
        text += f"; it matches {listing(buffers, 3)}, a buffer, and buffers are never frozen"
    if meant := next((each["meant"] for each in told if each["meant"]), None):
        text += f"; perhaps {meant!r} was meant"
    elif pattern in closest:
        text += f"; for the name {pattern!r} itself write {escape(pattern)!r}"
    if re.search(REGEX, pattern):
        text += r"; a glob is no regex, and knows * ? [ ] { } alone, none of \ ^ $ ( ) | + .*"
    return text


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
