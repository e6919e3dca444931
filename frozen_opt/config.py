"""Where a role's patterns come from: any kind of config, and none of their libraries imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from inspect import getattr_static
from types import FunctionType
from typing import Any

from frozen_opt.errors import FreezeConfigError
from frozen_opt.matching.patterns import check_patterns


def has(node: object, key: str) -> bool:
    """Whether the node has the key, be its value None."""
    if not isinstance(node, Mapping):
        return hasattr(node, key)
    try:
        # keys(), since OmegaConf's `in` denies a key whose mandatory value "???" was never given
        return key in node.keys()  # noqa: SIM118
    except (KeyError, AttributeError):  # a mapping over attributes, such as verl's
        return False


def lookup(node: object, key: str) -> Any:
    """`node[key]` of a mapping (OmegaConf's included), else `node.key`; None where it is missing."""
    if not has(node, key):
        return None
    return node[key] if isinstance(node, Mapping) else getattr(node, key)


def read_patterns(config: object, role: str) -> list[str]:
    """The role's list of patterns.

    Args:
        config: A mapping, an OmegaConf or pydantic object, a dataclass or a plain namespace. The role's
            node in it is `trainer.<role>`, else `<role>`, else the object itself when it has
            `freeze_parameters` or `optimizer_config`.
        role: `policy`, `critic`, or any other name.

    Returns:
        The patterns of its `freeze_parameters`; an empty list where the node has none.

    Raises:
        FreezeConfigError: There is no node for the role, or the list has the wrong shape.
    """
    trainer = lookup(config, "trainer")
    nodes = {
        f"trainer.{role}": lookup(trainer, role),
        role: lookup(config, role),
        "the config itself": config if has(config, _KEY) or has(config, "optimizer_config") else None,
    }
    places = [place for place, node in nodes.items() if _is_node(node)]
    if places:
        node = nodes[places[0]]
        _refuse_an_overlooked_list(role, places[0], {**nodes, "trainer": trainer, "the config": config})
        return check_patterns(lookup(node, _KEY), role)
    raise FreezeConfigError(
        f"no settings for role {role!r} in this {type(config).__name__}: looked for trainer.{role}, for "
        f"{role}, and for freeze_parameters or optimizer_config in the object itself. Pass the trainer's "
        "config, or give the patterns to with_freezing(..., patterns=...)"
    )


_KEY = "freeze_parameters"


def _is_node(node: object) -> bool:
    """Something with keys or attributes of its own, not a name such as Stable-Baselines' `MlpPolicy`."""
    return node is not None and not isinstance(node, str | bytes | int | float | list | tuple)


def _refuse_an_overlooked_list(role: str, here: str, nodes: Mapping[str, Any]) -> None:
    """Raise if the node has a list under a name that is not read, or if one stands a level off."""
    node = nodes[here]
    keys = _keys(node)
    alike = [key for key in keys if key != _KEY and _looks_alike(key) and _is_given(_peek(node, key))]
    mistyped = [] if _KEY in keys else get_close_matches(_KEY, keys, n=1, cutoff=0.75)
    if wrong := [*alike, *mistyped]:
        raise FreezeConfigError(
            f"role {role!r}: {here} has {wrong[0]}, which is not read: call it {_KEY}, a list of patterns "
            "(if it means something else, hand the patterns to with_freezing(..., patterns=...))"
        )
    if _is_given(_peek(node, _KEY)):
        return
    below = {f"{here}.{key}": _peek(node, key) for key in keys if key != _KEY}
    for place, other in {**nodes, **below}.items():
        if other is not node and _is_node(other) and _is_given(_peek(other, _KEY)):
            raise FreezeConfigError(
                f"role {role!r}: {_KEY} stands in {place}, where it is not read, since {here} is there: "
                f"move it to {here}.{_KEY}"
            )


def _keys(node: object) -> list[str]:
    """What a node has: the keys of a mapping, else its attributes, slots and those of its class included."""
    if isinstance(node, Mapping):
        return list(map(str, node.keys()))
    code = (property, cached_property, classmethod, staticmethod, FunctionType)  # nothing of it is run
    return [
        name
        for name in dir(node)
        if not name.startswith("_") and not isinstance(getattr_static(node, name, None), code)
    ]


def _peek(node: object, key: str) -> Any:
    """`lookup`, and None for what can't be read: a mandatory value of OmegaConf's that is none of ours."""
    try:
        return lookup(node, key)
    except Exception:
        return None


def _looks_alike(key: str) -> bool:
    """`freeze`, `freeze_modules`, `frozen_params`, …; not `freeze_vision_tower`, which is its owner's."""
    first, *rest = key.lower().split("_")
    if first == "trainable":
        return bool(rest) and _WHAT.issuperset(rest)
    return first in ("freeze", "frozen") and _WHAT.issuperset(rest)


_WHAT = {
    f"{noun}{plural}"
    for noun in (
        "param",
        "parameter",
        "module",
        "layer",
        "weight",
        "name",
        "pattern",
        "glob",
        "regex",
        "list",
    )
    for plural in ("", "s")
}


def _is_given(value: object) -> bool:
    """A value that says to freeze something: no flag, no number, nothing empty."""
    return isinstance(value, str | Sequence | Mapping) and len(value) > 0
