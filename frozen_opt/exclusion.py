"""The proof that no optimizer holds a frozen parameter: by identity, by name, by memory and by value."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from frozen_opt.backends import choose_backend, find_optimizers
from frozen_opt.errors import FrozenParameterInOptimizerError, UnsupportedBackendError, listing
from frozen_opt.places import Place
from frozen_opt.report import frozen_so_far, optimizers_elsewhere
from frozen_opt.selection import Selection

Optimizers = Sequence[tuple[Any, Sequence[torch.Tensor]]]
"""Optimizers, each with the model's parameters that it steps."""


def prove_excluded(
    role: str, about: str, planned: Mapping[str, Place], now: Selection, optimizers: Optimizers
) -> tuple[dict[str, nn.Parameter], str]:
    """Prove that no optimizer that a factory built holds a frozen parameter.

    Args:
        role: Whose optimizers they are.
        about: What error texts begin with.
        planned: Where the parameters stand that were frozen before the factory ran, by each of their names.
        now: What the patterns select by now: the factory may have put other tensors under these names, when
            it shards the model, say.
        optimizers: What it built; none where it builds none.

    Returns:
        What is frozen now, by name, tied parameters under each of their names; and the backend on which the
        model runs now.

    Raises:
        FrozenParameterInOptimizerError: One does, or a name holds a trainable tensor again.
        UnsupportedBackendError: The optimizers can't be checked, or the factory has made of the model what
            its backend can't honour.
    """
    tensors = {id(tensor): tensor for _, held in optimizers for tensor in held}
    frozen = _frozen_now(planned, now)
    remedy = "Give it frozen_opt.trainable_parameters(model) in place of model.parameters()"
    put_back = "The requires_grad flags were put back"
    names = {id(parameter): name for name, parameter in reversed(frozen.items())}  # the first of each
    if caught := [name for key, name in reversed(names.items()) if key in tensors and name in planned]:
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds {len(caught)} frozen parameters: {listing(caught)}. {remedy}. "
            f"{put_back}"
        )
    if undone := [name for name in reversed(names.values()) if frozen[name].requires_grad]:
        raise FrozenParameterInOptimizerError(
            f"{about}: while the optimizer was built, {listing(undone)} became trainable again, or came up "
            "as a new parameter that the patterns match (a loading or sharding step, or an adapter). Let it "
            f"do so before the freeze. {put_back}"
        )
    backend = choose_backend(now.walk)
    if refusal := backend.refusal(now.walk, list(now.frozen.values())):
        raise UnsupportedBackendError(f"{about}: {refusal}")
    if gone := [name for name in planned if name not in frozen]:
        raise UnsupportedBackendError(
            f"{about}: while the optimizer was built, {listing(gone)} went from the model, so that nothing "
            "can be proved about them. Let what replaces modules do so before the freeze"
        )
    own = set(map(id, now.walk.parameters))
    if tensors and own.isdisjoint(tensors):
        raise UnsupportedBackendError(
            f"{about}: the optimizer holds none of the model's parameters (copies, perhaps), so nothing can "
            "be proved about it. Teach frozen_opt this optimizer with register_backend"
        )
    if shared := _sharing_memory(frozen, tensors.values()):
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds tensors in the memory of {listing(shared)}, and would move them. "
            "Tie parameters by assigning the parameter itself, so that frozen_opt sees the tie, or freeze "
            f"both. {put_back}"
        )
    if copied := _copied(frozen, [tensor for key, tensor in tensors.items() if key not in own]):
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds copies of {listing(copied)} (master weights, perhaps), which it "
            f"would move. {remedy}, or build the copies of these alone. {put_back}"
        )
    prove_apart(role, set(tensors))
    return frozen, backend.name


def _frozen_now(planned: Mapping[str, Place], now: Selection) -> dict[str, nn.Parameter]:
    """What stands where something was frozen, and what the patterns select by now."""
    own = set(map(id, now.walk.parameters))
    standing = {name: place() for name, place in planned.items()}
    frozen = {name: it for name, it in standing.items() if it is not None and id(it) in own}
    return frozen | {name: found.parameter for name, found in now.frozen.items()}


def prove_apart(role: str, held: set[int]) -> None:
    """Raise if one of the parameters with these ids has been frozen before, by this role or another."""
    for other, name, parameter in frozen_so_far():
        if id(parameter) not in held:
            continue
        if other != role:
            raise FrozenParameterInOptimizerError(
                f"the optimizer of role {role!r} holds {listing([name])}, which role {other!r} has frozen: "
                f"they share this tensor. Freeze it for {role!r} as well, or leave it trainable for both"
            )
        if not parameter.requires_grad:
            raise FrozenParameterInOptimizerError(
                f"the optimizer of role {role!r} holds {listing([name])}, which this role froze before, and "
                "which still requires no gradient. Give the optimizer "
                "frozen_opt.trainable_parameters(model), or set requires_grad_(True) if it shall train again"
            )


def prove_free(role: str, about: str, names: Mapping[int, str]) -> None:
    """Raise if another role's optimizer holds one of the parameters that are to be frozen (id -> name)."""
    for other, optimizer in optimizers_elsewhere(role):
        held = [parameter for _, parameters in find_optimizers(optimizer) for parameter in parameters]
        if shared := [names[id(parameter)] for parameter in held if id(parameter) in names]:
            raise FrozenParameterInOptimizerError(
                f"{about}: the optimizer of role {other!r} holds {listing(shared)}: the two roles share "
                f"these tensors. Freeze them for {other!r} as well, before its optimizer is built"
            )


def _sharing_memory(frozen: Mapping[str, torch.Tensor], held: Iterable[torch.Tensor]) -> list[str]:
    """Names of frozen tensors whose bytes an optimizer's tensor covers: ties by `.data`, views of a part.

    By range and not by storage, since FSDP1 and ZeRO lay neighbours out in one.
    """
    ranges = sorted((*span, name) for name, tensor in frozen.items() if (span := _span(tensor)))
    starts = [start for start, _, _ in ranges]
    shared = set()
    for tensor in held:
        if span := _span(tensor):
            # Frozen ranges may overlap each other only where they are the same memory.
            place = bisect_right(starts, span[1] - 1)
            while place and ranges[place - 1][1] > span[0]:
                place -= 1
                shared.add(ranges[place][2])
    return [name for name in frozen if name in shared]


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """From the first byte to behind the last one of what this rank holds; None where it holds nothing."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard
    if local.numel() == 0 or local.layout is not torch.strided or local.device.type == "meta":
        return None
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    try:
        start = local.data_ptr()
    except RuntimeError:  # fake tensors have no memory
        return None
    return (start, start + (last + 1) * local.element_size()) if start else None


def _copied(frozen: Mapping[str, torch.Tensor], foreign: Sequence[torch.Tensor]) -> list[str]:
    """Names of frozen tensors of which a tensor from outside the model is a copy, in any precision.

    Tensors of one value tell nothing: a new bias looks like any other.
    """
    alike = [
        (name, tensor, copy)
        for copy in foreign
        for name, tensor in frozen.items()
        if copy.shape == tensor.shape and _span(copy) and _span(tensor) and copy.device == tensor.device
    ]
    return [
        name
        for name, tensor, copy in alike
        if torch.equal(copy.detach().to(tensor.dtype), tensor.detach()) and not _is_constant(tensor)
    ]


def _is_constant(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())
