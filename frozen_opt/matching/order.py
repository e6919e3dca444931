"""Names that were found on several ranks, put in the order of the whole model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def in_model_order(rows: Mapping[str, T]) -> list[T]:
    """The rows of all ranks in model order.

    Pipeline stages and expert-parallel ranks each hold a part: the parts are merged as a tree of name
    components, with numbered siblings (layers, experts) by number and all others as they were first met.

    Args:
        rows: Canonical name -> row, in the order of the ranks.
    """
    tree: dict[str, Any] = {}
    for name, row in rows.items():
        node = tree
        for component in name.split("."):
            node = node.setdefault(component, {})
        node[""] = row  # no component is empty
    ordered: list[T] = []
    _collect(tree, ordered)
    return ordered


def _collect(node: dict[str, Any], ordered: list[Any]) -> None:
    if len(node) == 1:  # nothing to sort, as in most nodes
        ((component, inner),) = node.items()
        if component == "":
            ordered.append(inner)
        else:
            _collect(inner, ordered)
        return
    first_of_kind: dict[str, int] = {}
    for place, component in enumerate(node):
        first_of_kind.setdefault(_NUMBER.sub("", component), place)
    for component in sorted(node, key=lambda key: (first_of_kind[_NUMBER.sub("", key)], _number(key))):
        if component == "":
            ordered.append(node[component])
        else:
            _collect(node[component], ordered)


_NUMBER = re.compile(r"[0-9]+$")  # `17`, and the `weight17` of grouped experts


def _number(component: str) -> int:
    match = _NUMBER.search(component)
    return int(match[0]) if match else -1
