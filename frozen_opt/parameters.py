"""A model's parameters by their canonical names: what factories, checkpoints and checks ask for.

Above the backends, since some number layers and experts anew, or show other tensors while they are in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

import frozen_opt.backends  # noqa: F401 - Megatron's tells how it numbers layers and experts
from frozen_opt.backends.base import Backend
from frozen_opt.backends.registry import choose_backend
from frozen_opt.matching.names import Found, module_list, walk

Model = nn.Module | Sequence[nn.Module]
"""A module, however wrapped, or Megatron's list of chunks."""


def named_parameters(model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical names and parameters, in model order, tied parameters under each of their names.

    Args:
        model: A module, however wrapped, or Megatron's list of chunks.
    """
    return ((found.name, found.parameter) for found in walk(module_list(model)).found)


def trainable_found(model: nn.Module | Sequence[nn.Module]) -> list[Found]:
    """Each parameter that requires a gradient, once, as found under its first canonical name."""
    first: dict[int, Found] = {}
    for found in walk(module_list(model)).found:
        if found.parameter.requires_grad:
            first.setdefault(id(found.parameter), found)
    return list(first.values())


def trainable_named_parameters(
    model: nn.Module | Sequence[nn.Module],
) -> list[tuple[str, nn.Parameter]]:
    """Each parameter that requires a gradient, once, with its first canonical name, in model order."""
    return [(found.name, found.parameter) for found in trainable_found(model)]


def trainable_parameters(model: nn.Module | Sequence[nn.Module]) -> list[nn.Parameter]:
    """Each parameter that requires a gradient, once, in model order: what an optimizer should get."""
    return [found.parameter for found in trainable_found(model)]


def resting_parameters(model: nn.Module | Sequence[nn.Module]) -> tuple[dict[str, nn.Parameter], Backend]:
    """Canonical name -> the parameter that an optimizer steps, and the backend that knows its elements.

    Between a forward and the backward, FSDP2 has gathered parameters in the module tree, which it drops
    again: those that they stand for are meant.
    """
    walked = walk(module_list(model))
    backend = choose_backend(walked)
    resting = backend.resting(walked)
    return {found.name: resting.get(id(found.parameter), found.parameter) for found in walked.found}, backend


def parameters_once(model: Model) -> dict[str, nn.Parameter]:
    """Each parameter once, by its first name."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in resting_parameters(model)[0].items():
        first.setdefault(id(parameter), (name, parameter))
    return dict(first.values())
