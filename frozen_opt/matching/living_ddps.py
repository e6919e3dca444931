"""The living DistributedDataParallels: nothing on a model tells that one wraps it.

They are noted as they take their models in, from the import of frozen_opt on, or of torch if that is later.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

living: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""Each DDP -> ids of the parameters for which it has no place, since they were frozen when it was made."""


def note_from_now_on(torch: ModuleType) -> None:
    """The hook that runs once torch is imported; importing this file is what notes them."""


def _note(module: nn.Module, name: str, child: Any) -> None:
    if isinstance(module, DistributedDataParallel) and isinstance(child, nn.Module):
        living[module] = {id(p) for p in child.parameters() if not p.requires_grad}


register_module_module_registration_hook(_note)
