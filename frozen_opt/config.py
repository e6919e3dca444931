"""Where a role's patterns come from: any kind of config, and none of their libraries imported."""

from __future__ import annotations

from collections.abc import Mapping
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
    for node in (lookup(lookup(config, "trainer"), role), lookup(config, role)):
        if node is not None:
            return check_patterns(lookup(node, "freeze_parameters"), role)
    if has(config, "freeze_parameters") or has(config, "optimizer_config"):
        return check_patterns(lookup(config, "freeze_parameters"), role)
    raise FreezeConfigError(
        f"no settings for role {role!r} in this {type(config).__name__}: looked for trainer.{role}, for "
        f"{role}, and for freeze_parameters or optimizer_config in the object itself. Pass the trainer's "
        "config, or give the patterns to with_freezing(..., patterns=...)"
    )
