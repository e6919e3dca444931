"""Where a parameter stands: its module, held weakly, and the attribute under which the module holds it.

That is how frozen_opt remembers parameters between calls. A reference to the tensor itself, even a weak one,
would keep `torch.utils.swap_tensors` from moving it, and so `Module.to()` from moving a sharded model.
"""

from __future__ import annotations

import weakref

from torch import nn


class Place:
    """`place()` is the parameter that stands there now, or None. Equal places are one place."""

    __slots__ = ("_hash", "_module", "attribute")

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self._hash = hash((id(module), attribute))
        self.attribute = attribute

    def __call__(self) -> nn.Parameter | None:
        module = self._module()
        return None if module is None else module._parameters.get(self.attribute)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place):
            return NotImplemented
        module = self._module()
        return module is not None and module is other._module() and self.attribute == other.attribute

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Place({type(self._module()).__name__}, {self.attribute!r})"
