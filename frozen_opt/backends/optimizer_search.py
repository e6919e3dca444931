"""The optimizers in what a factory returns, each with the model's parameters that it steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from frozen_opt.backends.base import Backend
from frozen_opt.backends.plain import TorchBackend
from frozen_opt.backends.registry import backends
from frozen_opt.errors import UnsupportedBackendError


def find_optimizers(result: object) -> list[tuple[Any, Sequence[torch.Tensor]]]:
    """Every optimizer in what a factory returned, with the model's parameters that it steps.

    Looks into containers and a few attributes deep into objects, whatever the attributes are called: tuples
    and dataclasses, optimizers made of optimizers, schedulers, wrappers. Of a module it looks at attributes
    with `optim` in their name alone (engines), and not at all behind an optimizer whose backend answers with
    the model's parameters in place of what the optimizer holds: that would be copies.
    """
    optimizers: list[tuple[Any, Sequence[torch.Tensor]]] = []
    visited: set[int] = set()
    pending = deque([(result, 0)])
    while pending:
        item, depth = pending.popleft()
        if isinstance(item, _LEAVES) or id(item) in visited:
            continue
        visited.add(id(item))
        backend, held = _ask_backends(item)
        if held is not None:
            optimizers.append((item, held))
        if isinstance(item, dict | list | tuple | set | frozenset | deque):
            pending.extend((part, depth) for part in _contents(item))
        elif depth < _DEPTH and (held is None or isinstance(backend, TorchBackend)):
            pending.extend((part, depth + 1) for part in _attributes(item))
    return optimizers


_LEAVES = (
    *(torch.Tensor, torch.Size, torch.device, torch.dtype, str, bytes, int, float, complex, type(None)),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
)
_DEPTH = 4
_MANY = 1000


def _ask_backends(item: object) -> tuple[Backend | None, Sequence[torch.Tensor] | None]:
    for backend in backends():
        if (held := backend.optimizer_parameters(item)) is not None:
            return backend, held
    return None, None


def _contents(container: Any) -> Iterable[Any]:
    items = container.values() if isinstance(container, dict) else container
    # A data set may be a list of millions; optimizers that are many (one a parameter) stand together.
    if len(container) > _MANY and _ask_backends(next(iter(items)))[1] is None:
        return ()
    return items


def _attributes(item: object) -> list[Any]:
    """What an object holds, without running any code of its own: neither properties nor `__getattr__`."""
    members = dict(getattr(item, "__dict__", {})) if type(item).__dictoffset__ else {}
    for cls in type(item).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):  # of __slots__
                with suppress(AttributeError):
                    members.setdefault(name, member.__get__(item))
    if isinstance(item, nn.Module):
        return [part for name, part in members.items() if "optim" in name]
    # The groups of an optimizer are what its backend has looked at, its state is large.
    return [part for name, part in members.items() if name not in ("param_groups", "state", "defaults")]


def require_optimizers(result: object) -> list[tuple[Any, Sequence[torch.Tensor]]]:
    """`find_optimizers`, or an error where there is none.

    Raises:
        UnsupportedBackendError: There is no optimizer in `result` that a backend can see into.
    """
    if optimizers := find_optimizers(result):
        return optimizers
    raise UnsupportedBackendError(
        f"the factory returned a {type(result).__module__}.{type(result).__qualname__}, in which frozen_opt "
        "finds no optimizer that it can check: return the optimizer (alone, or in a tuple, list, mapping or "
        "dataclass), or teach frozen_opt your optimizer with register_backend"
    )
