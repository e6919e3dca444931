"""Parameters that are no plain tensor: shards, and the quantized weights of torchao and bitsandbytes.

torchao's tensors are wrapper subclasses, which torch's own protocol (`__tensor_flatten__`) takes apart.
bitsandbytes' 4-bit weights are packed bytes that have the rest as an attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from frozen_opt.errors import UnsupportedBackendError

if TYPE_CHECKING:
    from frozen_opt.matching.names import Walk


def element_counts(walk: Walk, parameters: Sequence[torch.Tensor]) -> list[int]:
    """How many weights each parameter of a model stands for, packed or not."""
    if "bitsandbytes" not in sys.modules:
        return [parameter.numel() for parameter in parameters]
    # It keeps what it knows of a weight with the layer as well, where sharding leaves it.
    states = {
        id(found.parameter): state
        for found in walk.found
        if found.attribute == "weight" and (state := vars(found.owner).get("quant_state")) is not None
    }
    counts = []
    for parameter in parameters:
        state = getattr(parameter, "quant_state", states.get(id(parameter)))
        counts.append(parameter.numel() if state is None else torch.Size(state.shape).numel())
    return counts


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold its values on this rank; itself, if it is one."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        # A DTensor names its mesh as well.
        return [plain for part in inner if isinstance(part, torch.Tensor) for plain in inner_tensors(part)]
    state = getattr(tensor, "quant_state", None)
    return [tensor] if state is None else [tensor, *_tensors_of(state)]


def stored_elements(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's elements as they are stored; as bytes, if in several tensors.

    Raises:
        UnsupportedBackendError: There is nothing that could be read.
    """
    parts = [part.detach() for part in inner_tensors(parameter)]
    for part in parts:
        if not has_memory(part) and part.numel():
            raise UnsupportedBackendError(
                f"the values of a {type(parameter).__module__}.{type(parameter).__qualname__} can't be read "
                f"({part.layout}, {part.dtype}, on {part.device}). If it is a tensor subclass, it needs "
                "__tensor_flatten__; else teach frozen_opt to read it with register_backend, by elements()"
            )
    plain = [part.as_subclass(torch.Tensor) for part in parts]
    if len(plain) == 1:
        return plain[0]
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in plain])


def has_memory(tensor: torch.Tensor) -> bool:
    """Are there values that can be read? Not of meta and fake tensors, and of wrapper subclasses."""
    try:
        return tensor.layout is torch.strided and not tensor.is_quantized and bool(tensor.data_ptr())
    except RuntimeError:  # fake tensors
        return False


def _tensors_of(state: Any) -> list[torch.Tensor]:
    """What a bitsandbytes QuantState has, nested ones too: the weights' scales."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = vars(state).values() if hasattr(state, "absmax") else ()
    return [tensor for part in parts for tensor in _tensors_of(part)]
