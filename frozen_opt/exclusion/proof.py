"""The proof that no optimizer holds a frozen parameter: by identity, by name, by memory and by value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from frozen_opt.backends.base import Backend
from frozen_opt.backends.optimizer_search import find_optimizers
from frozen_opt.backends.registry import choose_backend
from frozen_opt.errors import FrozenParameterInOptimizerError, UnsupportedBackendError, listing
from frozen_opt.exclusion.copies import find_copies
from frozen_opt.exclusion.overlap import sharing_memory
from frozen_opt.matching.places import Place
from frozen_opt.matching.selection import Selection
from frozen_opt.reports.remembered import frozen_so_far, optimizers_elsewhere

Optimizers: TypeAlias = Sequence[tuple[Any, Sequence[torch.Tensor]]]
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

    First by identity, since that is what users do, and its error has the remedy. Then what the factory made
    of the model: flags, backend, names, each of which makes what follows meaningless. Then whether the
    optimizer is the model's at all, and only then memory and values, which take longest to compare.

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
    held = held_by(optimizers)
    frozen = _frozen_now(planned, now)
    once = {name: frozen[name] for name in _first_names(frozen)}
    _refuse_held(about, {name: it for name, it in once.items() if name in planned}, held)
    _refuse_trainable_again(about, once)
    backend = choose_backend(now.walk)
    if refusal := backend.refusal(now.walk, now.chosen):
        raise UnsupportedBackendError(f"{about}: {refusal}")
    _refuse_vanished(about, planned, frozen)
    refuse_a_strangers_optimizer(about, held, now.walk.parameters)
    _refuse_overlap(about, once, held)
    second = refuse_copies(about, once, now.walk.parameters, held, backend, {})
    refuse_frozen_before(role, optimizers)
    return Exclusion(frozen, backend.name, second)


def held_by(optimizers: Optimizers) -> dict[int, torch.Tensor]:
    """The tensors that optimizers step, by id."""
    return {id(tensor): tensor for _, tensors in optimizers for tensor in tensors}


def _frozen_now(planned: Mapping[str, Place], now: Selection) -> dict[str, nn.Parameter]:
    """What stands where something was frozen, and what the patterns select by now."""
    own = set(map(id, now.walk.parameters))
    standing = {name: place() for name, place in planned.items()}
    frozen = {name: it for name, it in standing.items() if it is not None and id(it) in own}
    return frozen | {found.name: found.parameter for found in now.chosen}


def _first_names(frozen: Mapping[str, nn.Parameter]) -> list[str]:
    """Of each parameter the first of its names."""
    first: dict[int, str] = {}
    for name, parameter in frozen.items():
        first.setdefault(id(parameter), name)
    return list(first.values())


_PUT_BACK = "The requires_grad flags were put back"


def _refuse_held(about: str, frozen: Mapping[str, nn.Parameter], held: Mapping[int, torch.Tensor]) -> None:
    if caught := [name for name, parameter in frozen.items() if id(parameter) in held]:
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds {len(caught)} frozen parameters: {listing(caught)}. Give it "
            f"frozen_opt.trainable_parameters(model) in place of model.parameters(). {_PUT_BACK}"
        )


def _refuse_trainable_again(about: str, frozen: Mapping[str, nn.Parameter]) -> None:
    if undone := [name for name, parameter in frozen.items() if parameter.requires_grad]:
        raise FrozenParameterInOptimizerError(
            f"{about}: while the optimizer was built, {listing(undone)} became trainable again, or came up "
            "as a new parameter that the patterns match (a loading or sharding step, or an adapter). Let it "
            f"do so before the freeze. {_PUT_BACK}"
        )


def _refuse_vanished(about: str, planned: Iterable[str], frozen: Mapping[str, nn.Parameter]) -> None:
    if gone := [name for name in planned if name not in frozen]:
        raise UnsupportedBackendError(
            f"{about}: while the optimizer was built, {listing(gone)} went from the model, so that nothing "
            "can be proved about them. Let what replaces modules do so before the freeze"
        )


def is_a_strangers(held: Mapping[int, torch.Tensor], parameters: Iterable[torch.Tensor]) -> bool:
    """Whether an optimizer that holds these tensors, by id, holds none of a model's parameters."""
    return bool(held) and held.keys().isdisjoint(map(id, parameters))


def refuse_a_strangers_optimizer(
    about: str, held: Mapping[int, torch.Tensor], parameters: Iterable[torch.Tensor]
) -> None:
    """Raise if the optimizer is another model's, or steps copies of this one alone.

    Raises:
        UnsupportedBackendError: It holds none of the model's parameters.
    """
    if is_a_strangers(held, parameters):
        raise UnsupportedBackendError(
            f"{about}: the optimizer holds none of the model's parameters (copies, perhaps), so nothing can "
            "be proved about it. Pass the model that it trains, or teach frozen_opt this optimizer with "
            "register_backend"
        )


def _refuse_overlap(about: str, frozen: Mapping[str, torch.Tensor], held: Mapping[int, torch.Tensor]) -> None:
    if shared := sharing_memory(frozen, held.values()):
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds tensors in the memory of {listing(shared)}, and would move them. "
            "Tie parameters by assigning the parameter itself, so that frozen_opt sees the tie, or freeze "
            f"both. {_PUT_BACK}"
        )


def refuse_copies(
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


def refuse_frozen_before(role: str, optimizers: Optimizers) -> None:
    """Raise if a role's optimizers hold what this role or another one froze before.

    Raises:
        FrozenParameterInOptimizerError: They do.
    """
    held = held_by(optimizers)
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


def refuse_parameters_of_other_optimizers(role: str, about: str, names: Mapping[int, str]) -> None:
    """Raise if another role's optimizer holds one of the parameters that are to be frozen (id -> name).

    Raises:
        FrozenParameterInOptimizerError: It does.
    """
    for other, optimizer in optimizers_elsewhere(role):
        held = held_by(find_optimizers(optimizer))
        if shared := [names[key] for key in held if key in names]:
            raise FrozenParameterInOptimizerError(
                f"{about}: the optimizer of role {other!r} holds {listing(shared)}: the two roles share "
                f"these tensors. Freeze them for {other!r} as well, before its optimizer is built"
            )
