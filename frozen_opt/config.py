"""Where a role's patterns come from: any kind of config, and none of their libraries imported."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from frozen_opt.errors import FreezeConfigError
from frozen_opt.patterns import check_patterns


def has(node: object, key: str) -> bool:
    """Whether the node has the key, be its value None."""
    # keys(), since OmegaConf's `in` denies a key whose mandatory value "???" was never given
    return key in node.keys() if isinstance(node, Mapping) else hasattr(node, key)  # noqa: SIM118


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
    found = [place for place, node in nodes.items() if _is_node(node)]
    if found:
        node = nodes[found[0]]
        if not has(node, _KEY):
            _refuse_a_misplaced_list(role, found[0], {**nodes, "trainer": trainer})
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


def _refuse_a_misplaced_list(role: str, here: str, nodes: Mapping[str, Any]) -> None:
    """Raise if a node without a list has one under a mistyped key, or if one stands nearby."""
    node = nodes[here]
    keys = [str(key) for key in (node.keys() if isinstance(node, Mapping) else getattr(node, "__dict__", ()))]
    if close := get_close_matches(_KEY, keys, n=1, cutoff=0.75):
        raise FreezeConfigError(f"role {role!r}: {here} has {close[0]}, which is not read: call it {_KEY}")
    nearby = {**nodes, f"{here}.optimizer_config": lookup(node, "optimizer_config")}
    for place, other in nearby.items():
        if other is not node and _is_node(other) and lookup(other, _KEY):
            raise FreezeConfigError(
                f"role {role!r}: {_KEY} stands in {place}, where it is not read, since {here} is there: "
                f"move it to {here}.{_KEY}"
            )
