"""Where a parameter stands: its module, held weakly, and the attribute under which the module holds it.

That is how frozen_opt remembers parameters between calls. A reference to the tensor itself, even a weak one,
would keep `torch.utils.swap_tensors` from moving it, and so `Module.to()` from moving a sharded model.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import nn


class Place(NamedTuple):
    """`place()` is the parameter that stands there now, or None. Equal places are one place."""

    owner: weakref.ref[nn.Module]
    attribute: str

    @classmethod
    def of(cls, module: nn.Module, attribute: str) -> Place:
        """The place of a module's parameter."""
        return tuple.__new__(cls, (weakref.ref(module), attribute))  # at half of the usual cost

    def __call__(self) -> nn.Parameter | None:
        module = self[0]()
        return None if module is None else module._parameters.get(self[1])

    @property
    def module(self) -> nn.Module | None:
        return self.owner()
