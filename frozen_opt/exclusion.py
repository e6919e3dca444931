"""The proof that no optimizer holds a frozen parameter: by identity, by name, by memory and by value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from frozen_opt.backends import Backend, choose_backend, find_optimizers
from frozen_opt.copies import find_copies, sharing_memory
from frozen_opt.errors import FrozenParameterInOptimizerError, UnsupportedBackendError, listing
from frozen_opt.places import Place
from frozen_opt.report import frozen_so_far, optimizers_elsewhere
from frozen_opt.selection import Selection

Optimizers = Sequence[tuple[Any, Sequence[torch.Tensor]]]
"""Optimizers, each with the model's parameters that it steps."""


class Exclusion(NamedTuple):
    """What there was to see once a factory had run, and nothing frozen in an optimizer."""

    frozen: Mapping[str, nn.Parameter]
    """What is frozen now, by name, tied parameters under each of their names."""
    backend: str
    """The one on which the model runs now."""
    second: Mapping[str, int]
    """Of which of them a second network has copies, and how many; see `copies`."""


def prove_excluded(
    role: str, about: str, planned: Mapping[str, Place], now: Selection, optimizers: Optimizers
) -> Exclusion:
    """Prove that no optimizer that a factory built holds a frozen parameter.

    Args:
        role: Whose optimizers they are.
        about: What error texts begin with.
        planned: Where the parameters stand that were frozen before the factory ran, by each of their names.
        now: What the patterns select by now: the factory may have put other tensors under these names, when
            it shards the model, say.
        optimizers: What it built; none where it builds none.

    Returns:
        What there was to see.

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
    once = {name: frozen[name] for name in reversed(names.values())}
    if shared := sharing_memory(once, tensors.values()):
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds tensors in the memory of {listing(shared)}, and would move them. "
            "Tie parameters by assigning the parameter itself, so that frozen_opt sees the tie, or freeze "
            f"both. {put_back}"
        )
    second = prove_uncopied(about, once, now.walk.parameters, tensors, backend, {})
    prove_apart(role, set(tensors))
    return Exclusion(frozen, backend.name, second)


def _frozen_now(planned: Mapping[str, Place], now: Selection) -> dict[str, nn.Parameter]:
    """What stands where something was frozen, and what the patterns select by now."""
    own = set(map(id, now.walk.parameters))
    standing = {name: place() for name, place in planned.items()}
    frozen = {name: it for name, it in standing.items() if it is not None and id(it) in own}
    return frozen | {name: found.parameter for name, found in now.frozen.items()}


def prove_uncopied(
    about: str,
    frozen: Mapping[str, torch.Tensor],
    parameters: Iterable[torch.Tensor],
    held: Mapping[int, torch.Tensor],
    backend: Backend,
    second: Mapping[str, int],
) -> Mapping[str, int]:
    """Raise if what an optimizer holds from outside the model has values of frozen parameters in it.

    Args:
        about: What error texts begin with.
        frozen: The frozen parameters, by name.
        parameters: All of the model's.
        held: What the optimizer holds, by id.
        backend: The model's.
        second: What this returned when the optimizer was built.

    Returns:
        Of which frozen parameters a second network has copies, and how many.
    """
    own = {id(parameter): parameter for parameter in parameters}
    foreign = [tensor for key, tensor in held.items() if key not in own]
    if not foreign:  # the usual case, which costs nothing
        return second
    others = own.keys() - set(map(id, frozen.values()))
    trainable = [own[key] for key in others if own[key].requires_grad]
    copies = find_copies(frozen, trainable, held, foreign, backend.elements, second)
    if copies.held:
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds copies of {listing(copies.held)} (master weights, perhaps in one "
            "flat tensor), which it would move. Build the copies of frozen_opt.trainable_parameters(model) "
            "alone. If they are weights of a second network that started from the same ones, build its "
            "optimizer by itself, outside of this factory"
        )
    if copies.unclear:
        raise UnsupportedBackendError(
            f"{about}: the optimizer holds master weights, and {listing(copies.unclear)} may be among them: "
            "these are zeros, ones or a few numbers, which tell nothing. If they are not (zeros may be "
            "padding), say which parameters this optimizer steps: register_backend(MyBackend()), whose "
            "optimizer_parameters(optimizer) returns those of the model"
        )
    return copies.second


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
