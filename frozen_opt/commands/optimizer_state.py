"""How many bytes of state an optimizer keeps for each parameter, measured without the memory for it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from frozen_opt.commands.bad_input import first_line
from frozen_opt.optimizers_by_name import muon_split, optimizer_class
from frozen_opt.parameters import trainable_found


class Unmeasurable(Exception):
    """The optimizer takes no step on tensors that stand for others; the text says why."""


def state_bytes(
    model: nn.Module, optimizer: str, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> list[tuple[nn.Parameter, int]]:
    """For each trainable parameter the bytes of state that an optimizer keeps for it after a step.

    Measured on fake tensors, each kind of shape once. Optimizers that read values, such as Adafactor, take
    real steps on tensors of 2 or 3 elements a side, from which the size follows.
    """
    parts: list[tuple[str, list[nn.Parameter], Mapping[str, Any]]]
    if optimizer == "Muon":  # the hybrid that build_optimizer makes
        matrices, others = muon_split(model)
        parts = [("Muon", matrices, {}), ("AdamW", others, {})]
    else:
        parts = [(optimizer, [found.parameter for found in trainable_found(model)], kwargs)]
    sizes: list[tuple[nn.Parameter, int]] = []
    for name, parameters, options in parts:
        kind = optimizer_class(name)
        accepted = inspect.signature(kind).parameters
        options = {key: value for key, value in {"lr": 1e-3, **options}.items() if key in accepted}
        shapes = [tuple(parameter.shape) for parameter in parameters]
        measured = _measure(partial(kind, **options), list(dict.fromkeys(shapes)), dtype)
        sizes += zip(parameters, map(measured.__getitem__, shapes), strict=True)
    return sizes


_Shape = tuple[int, ...]
_Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _measure(build: _Build, shapes: Sequence[_Shape], dtype: torch.dtype) -> dict[_Shape, int]:
    try:
        with FakeTensorMode():
            return dict(zip(shapes, _step(build, shapes, dtype), strict=True))
    except Exception:  # whatever an optimizer raises that reads values
        pass
    try:
        return {shape: _from_small_steps(build, shape, dtype) for shape in shapes}
    except Exception as error:
        raise Unmeasurable(f"it takes no step here: {first_line(error)}") from error


def _step(build: _Build, shapes: Sequence[_Shape], dtype: torch.dtype) -> list[int]:
    tensors = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    optimizer = build(tensors)
    optimizer.step()
    return [_bytes(optimizer.state[tensor]) for tensor in tensors]


def _from_small_steps(build: _Build, shape: _Shape, dtype: torch.dtype) -> int:
    """The size for a large shape, from those for small ones: it is linear in each side's length."""

    def at(sides: _Shape) -> int:
        corners = itertools.product((2, 3), repeat=len(sides))
        return sum(
            measured[corner]
            * prod(3 - side if end == 2 else side - 2 for side, end in zip(sides, corner, strict=True))
            for corner in corners
        )

    corners = list(itertools.product((2, 3), repeat=len(shape)))
    measured = dict(zip(corners, _step(build, corners, dtype), strict=True))
    probe = tuple(range(4, 4 + len(shape)))
    if _step(build, [probe], dtype) != [at(probe)]:
        raise ValueError("its state does not grow with the sides of a tensor")
    return at(shape)


def _bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(_bytes, parts))
