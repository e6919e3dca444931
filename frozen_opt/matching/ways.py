"""The ways through the modules to some parameters: do they still lead there?

As long as each child stands under its key in its parent, the parameters have the names that they had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import ref

from torch import nn

from frozen_opt.matching.names import Found, Step


def lead_there(steps: Iterable[Step | None]) -> bool:
    """Does each child stand where it stood?

    Args:
        steps: The last step to each parameter, as `Found.step`.
    """
    return all(parent._modules.get(key) is child for parent, key, child in _ways(steps))


class Ways:
    """The ways to parameters, held weakly.

    Args:
        found: The parameters.
    """

    def __init__(self, found: Iterable[Found]) -> None:
        self._steps: list[tuple[ref[nn.Module], str, ref[nn.Module]]] = [
            (ref(parent), key, ref(child)) for parent, key, child in _ways(each.step for each in found)
        ]

    def lead_there(self) -> bool:
        """Does each child stand where it stood?"""
        for parent, key, child in self._steps:
            module = parent()
            if module is None or module._modules.get(key) is not child():
                return False
        return True


def _ways(steps: Iterable[Step | None]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Parent, key and child of all steps; most of a way is that of other parameters as well."""
    seen: set[int] = set()
    for step in steps:
        while step is not None and id(step) not in seen:
            seen.add(id(step))
            step, parent, key, child = step
            yield parent, key, child
