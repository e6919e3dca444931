"""Move an optimizer's state from one freeze list to another, by the names of its parameters.

States come in several forms: torch's own, with numbers in place of parameters; that of groups which were
built from names; torch.distributed.checkpoint's, with names nested or flattened (FSDP1's is the nested one);
and of an optimizer made of optimizers several such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from frozen_opt.errors import FreezeConfigError, UnsupportedBackendError, listing
from frozen_opt.guards.resume import frozen_then, optimizer_names
from frozen_opt.guards.trace import KEY
from frozen_opt.parameters import Model, parameters_once

_OWN = ("params", "param_names", KEY)
"""Of a group: what belongs to its optimizer, and is no setting."""


class _Origin(NamedTuple):
    """Where a parameter's state was."""

    group: Mapping[str, Any]
    state: Any
    """None where it had none."""


def migrate_optimizer_state(
    saved_state: Any, optimizer: Any, model: Model, *, saved: Mapping[str, Any] | None = None
) -> Any:
    """Move the state of an optimizer from one freeze list to another, parameter by parameter.

    What is trained now as it was then keeps its state, the very tensors; state of what is frozen now is
    left out; what was frozen then starts fresh. Learning rates and the like stay those of the group that
    a parameter was in.

        before, optimizer = optimizer, build_optimizer(model, config)  # with another list
        optimizer.load_state_dict(migrate_optimizer_state(before, optimizer, model))

    Args:
        saved_state: The optimizer itself, in mid-run; or what `optimizer.state_dict()` gave then, or
            torch.distributed.checkpoint's `get_optimizer_state_dict(model, optimizer)`, flattened or not, or
            `FSDP.optim_state_dict`; of an optimizer made of optimizers its own, or a list or mapping of such.
        optimizer: Today's, built under today's freeze; or a list or mapping of optimizers.
        model: Today's model.
        saved: What `report.state_dict(model, optimizer)` gave then. Needed where `saved_state` has numbers in
            place of names and comes from an optimizer that no decorated factory built.

    Returns:
        A state for `optimizer.load_state_dict`; for a list or mapping of optimizers one of states. What
        `FSDP.optim_state_dict` gave comes back in that form, for `FSDP.optim_state_dict_to_load`.

    Raises:
        FreezeConfigError: The state is no torch optimizer's, the names of its parameters can't be told, or
            parameters of one group were in several.
        UnsupportedBackendError: It keeps the moments in flat tensors.
    """
    _refuse_flat(saved_state, optimizer)
    origins: dict[str, _Origin] = {}
    names = _canonical_names(model)
    start = 0  # of a part's groups among all, as `saved` has them
    for part in _parts(saved_state, names, model):
        groups = part["param_groups"]
        for group, members in zip(groups, _saved_names(part, model, saved, start), strict=True):
            for key, name in zip(group["params"], members, strict=True):
                origins[names.get(name, name)] = _Origin(group, part["state"].get(key))
        start += len(groups)
    result = _moved(origins, optimizer, model)
    by_name = isinstance(saved_state, Mapping) and any(
        isinstance(key, str) for key in saved_state.get("state", ())
    )
    if by_name and any(getattr(each, "_fsdp_flattened", False) for each in parameters_once(model).values()):
        return _for_fsdp1(result, optimizer_names(optimizer, model))
    return result


def _moved(origins: Mapping[str, _Origin], optimizer: Any, model: Model) -> Any:
    if isinstance(optimizer, list | tuple):
        return [_moved(origins, each, model) for each in optimizer]
    if isinstance(optimizer, Mapping):
        return {key: _moved(origins, each, model) for key, each in optimizer.items()}
    result = optimizer.state_dict()
    if "optimizers" in result and hasattr(optimizer, "optimizers"):
        return {**result, "optimizers": [_moved(origins, each, model) for each in optimizer.optimizers]}
    result["state"] = {}
    for group, names in zip(result["param_groups"], optimizer_names(optimizer, model), strict=True):
        groups = [origins[name].group for name in names if name in origins]
        settings = {key: value for key, value in (groups or [group])[0].items() if key not in _OWN}
        if any({**other, **settings} != other for other in groups):
            raise FreezeConfigError(
                f"{listing(names)} are in one group of the optimizer now, and were in several with other "
                "settings then: build it with the same groups"
            )
        group.update(settings)
        for key, name in zip(group["params"], names, strict=True):
            if name in origins and origins[name].state is not None:
                result["state"][key] = origins[name].state
    return result


def _for_fsdp1(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """By names and whole, as `FSDP.optim_state_dict_to_load` takes it, which makes the shards."""
    groups = state["param_groups"]
    name_of = dict(zip(chain(*(group["params"] for group in groups)), chain(*names), strict=True))
    if fresh := [name for key, name in name_of.items() if key not in state["state"]]:
        raise UnsupportedBackendError(
            f"FSDP.optim_state_dict_to_load wants a state for each parameter, and {listing(fresh)} was "
            "frozen then: build the optimizer with the list of the checkpoint, load, call the factory with "
            "the new list, and move what optimizer.state_dict() gives"
        )
    return {
        "state": {name_of[key]: each for key, each in state["state"].items()},
        "param_groups": [
            {**group, "params": list(members)} for group, members in zip(groups, names, strict=True)
        ],
    }


def _parts(saved_state: Any, names: Mapping[str, str], model: Model) -> Iterator[Mapping[str, Any]]:
    """Each optimizer's state, with `state` and `param_groups`."""
    if isinstance(optimizer := saved_state, torch.optim.Optimizer):
        saved_state = optimizer.state_dict()
        if "param_groups" in saved_state:
            yield saved_state | {KEY: {"optimizer_names": optimizer_names(optimizer, model)}}
            return
        saved_state = getattr(optimizer, "optimizers", saved_state)
    if isinstance(saved_state, Mapping):
        if {"state", "param_groups"} <= saved_state.keys():
            yield saved_state
            return
        if any(isinstance(key, str) and key.startswith("param_groups.") for key in saved_state):
            yield _nested(saved_state, names)
            return
        saved_state = saved_state.get("optimizers", list(saved_state.values()))
    if not isinstance(saved_state, list | tuple) or not saved_state:
        raise FreezeConfigError(
            "this is no state of a torch optimizer: it lacks state and param_groups, and is no list of such "
            "states either"
        )
    for part in saved_state:
        yield from _parts(part, names, model)


def _nested(flat: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The nested form of torch.distributed.checkpoint's flattened one: a group for each parameter."""
    groups: dict[str, dict[str, Any]] = {}
    state: dict[str, Any] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, path = rest, list[str]()
        while name and name not in names:
            name, _, last = name.rpartition(".")
            path.insert(0, last)
        if not name or not path or kind not in ("state", "param_groups"):
            raise FreezeConfigError(
                f"the flattened optimizer state has {listing([key])}, which belongs to no parameter of the "
                "model"
            )
        target = (
            state.setdefault(name, {}) if kind == "state" else groups.setdefault(name, {"params": [name]})
        )
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value
    return {"state": state, "param_groups": list(groups.values())}


def _canonical_names(model: Model) -> dict[str, str]:
    """Canonical names, and those that torch.distributed.checkpoint gives, to the canonical one."""
    parameters = parameters_once(model)
    names = {name: name for name in parameters}
    if isinstance(model, nn.Module) and torch.distributed.is_available():
        from torch.distributed.checkpoint.state_dict import _get_fqns

        ids = {id(parameter): name for name, parameter in parameters.items()}
        for raw, parameter in model.named_parameters():
            with suppress(AttributeError):  # a wrapper that torch does not know
                for name in _get_fqns(model, raw):
                    names.setdefault(name, ids.get(id(parameter), name))
    return names


def _saved_names(
    part: Mapping[str, Any], model: Model, saved: Mapping[str, Any] | None, start: int
) -> list[list[str]]:
    """For each saved group the names of its parameters, from wherever they are."""
    groups: Sequence[Mapping[str, Any]] = part["param_groups"]
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return [list(group["params"]) for group in groups]
    traced = part.get(KEY)
    if isinstance(traced, Mapping) and traced.get("optimizer_names"):
        return [list(names) for names in traced["optimizer_names"]]
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    every: list[list[str]] = list((saved or {}).get("optimizer_names", ()))
    names = every[start : start + len(groups)]
    if not every and saved is not None and len(groups) == 1:
        frozen, parameters = frozen_then(saved), parameters_once(model)
        names = [[name for name in parameters if name not in frozen]]
        moments = [part["state"].get(key, {}).get("exp_avg") for key in groups[0]["params"]]
        if any(
            moment is not None and moment.shape != parameters[name].shape
            for name, moment in zip(names[0], moments, strict=False)
        ):
            names = []  # it was built in another order
    if list(map(len, names)) != [len(group["params"]) for group in groups]:
        raise FreezeConfigError(
            "the saved optimizer's parameters have numbers, and it can't be told which those of the model "
            "are: save report.state_dict(model, optimizer) beside the state, and pass it as saved="
        )
    return names


_FLAT = {
    "ZeRO": {"zero_stage", "single_partition_of_fp32_groups", "fp32_flat_groups", "partition_count"},
    "Megatron": {
        "fp32_from_fp16_params",
        "param_state",
        "param_state_sharding_type",
        "shard_fp32_from_float16_groups",
    },
}


def _refuse_flat(saved_state: Any, optimizer: Any) -> None:
    keys = saved_state.keys() if isinstance(saved_state, Mapping) else ()
    modules = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    for kind, package in (("ZeRO", "deepspeed"), ("Megatron", "megatron")):
        if package in modules or not _FLAT[kind].isdisjoint(keys):
            raise UnsupportedBackendError(
                f"{kind}'s optimizer keeps its moments in flat tensors over all that it trained, and its "
                "checkpoint does not tell the parameters in them apart: to change the freeze list, start the "
                "moments anew (load the weights alone), or keep the list"
            )
