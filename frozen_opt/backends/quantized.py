"""Parameters that are no plain tensor: shards, and the quantized weights of torchao and bitsandbytes.

torchao's tensors are wrapper subclasses, which torch's own protocol (`__tensor_flatten__`) takes apart.
bitsandbytes' 4-bit weights are packed bytes that have the rest as an attribute.
"""

from __future__ import annotations

from typing import Any

import torch

from frozen_opt.errors import UnsupportedBackendError


def element_count(parameter: torch.Tensor) -> int:
    """How many weights a parameter stands for, packed or not."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else torch.Size(state.shape).numel()


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold its values on this rank; itself, if it is one."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [plain for name in names for plain in inner_tensors(getattr(tensor, name))]
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
