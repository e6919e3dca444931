"""The ways through the modules to some parameters, held weakly: do they still lead there?"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import nn

from frozen_opt.matching.names import Found


class Ways:
    """For each step of the way from a chunk to a parameter: parent, key and child.

    As long as each child stands under its key in its parent, the parameters have the names that they had.

    Args:
        found: The parameters.
    """

    def __init__(self, found: Iterable[Found]) -> None:
        self._steps: list[tuple[ref[nn.Module], str, ref[nn.Module]]] = []
        seen: set[int] = set()  # most of a way is that of other parameters as well
        for each in found:
            step = each.step
            while step is not None and id(step) not in seen:
                seen.add(id(step))
                step, parent, key, child = step
                self._steps.append((ref(parent), key, ref(child)))

    def hold(self) -> bool:
        """Does each child stand where it stood?"""
        for parent, key, child in self._steps:
            module = parent()
            if module is None or module._modules.get(key) is not child():
                return False
        return True
