"""The living DistributedDataParallels: nothing on a model tells that one wraps it.

They are noted as they take their models in. Those that were made before this file was imported, since nothing
of frozen_opt was used yet, are found among the objects of the process.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

living: WeakKeyDictionary[nn.Module, set[int] | None] = WeakKeyDictionary()
"""Each DDP -> ids of the parameters for which it has no place, since they were frozen when it was made; None
where that is not known."""


def _note(module: nn.Module, name: str, child: Any) -> None:
    if isinstance(module, DistributedDataParallel) and isinstance(child, nn.Module):
        living[module] = {id(p) for p in child.parameters() if not p.requires_grad}


register_module_module_registration_hook(_note)
if dist.is_available() and dist.is_initialized():  # else there can be none
    for _object in gc.get_objects():
        if issubclass(type(_object), DistributedDataParallel):  # isinstance would ask proxies
            living[_object] = None
    del _object
