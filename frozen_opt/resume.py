"""Resume a run whose freeze list may have changed: find that out, and move the optimizer's state by name.

torch knows the parameters of an optimizer by number alone. With another freeze list the numbers mean other
parameters: at best loading fails, at worst each gets its neighbour's moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frozen_opt.errors import FreezeConfigError, ResumeMismatchError, listing
from frozen_opt.shards import resting_parameters

if TYPE_CHECKING:
    from frozen_opt.report import FreezeReport

Model = nn.Module | Sequence[nn.Module]


def report_state(
    report: FreezeReport, model: Model | None, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """What `FreezeReport.state_dict` says."""
    return {
        "version": 1,
        "role": report.role,
        "patterns": list(report.patterns),
        "backend": report.backend,
        "names": list(report.names),
        "element_count": report.element_count,
        # Always there: torch.distributed.checkpoint loads what the state to load into has keys for.
        "optimizer_names": [] if model is None or optimizer is None else _names(optimizer, model),
    }


def check_resume(report: FreezeReport, saved: Mapping[str, Any]) -> None:
    """What `FreezeReport.check_resume` says."""
    then, now = _frozen_then(saved), dict.fromkeys(report.names)
    if saved.get("role") != report.role:
        raise FreezeConfigError(
            f"role {report.role!r}: the saved report is that of role {saved.get('role')!r}"
        )
    now_trainable = [name for name in then if name not in now]
    now_frozen = [name for name in now if name not in then]
    differences = [
        (now_trainable, "frozen then, trainable now: {} (there is no state for them, they start fresh)"),
        (now_frozen, "trainable then, frozen now: {} (their state is of no use any more)"),
    ]
    if now_trainable or now_frozen:
        texts = "; ".join(text.format(listing(names)) for names, text in differences if names)
        raise ResumeMismatchError(
            f"role {report.role!r}: the checkpoint was saved under another freeze. {texts}. The optimizer's "
            "state does not fit as it is: move it with frozen_opt.migrate_optimizer_state, or restore "
            f"trainer.{report.role}.freeze_parameters to {saved.get('patterns')}",
            now_trainable,
            now_frozen,
        )


def migrate_optimizer_state(
    saved_state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    model: Model,
    *,
    saved: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Move the state of an optimizer from one freeze list to another, parameter by parameter.

    What is trained now as it was then keeps its state, the very tensors; state of what is frozen now is
    left out; what was frozen then starts fresh. Learning rates and the like stay those of the group that
    a parameter was in.

        optimizer.load_state_dict(migrate_optimizer_state(saved_state, optimizer, model, saved=saved))

    Args:
        saved_state: What `optimizer.state_dict()` gave then, or torch.distributed.checkpoint's
            `get_optimizer_state_dict(model, optimizer)`.
        optimizer: Today's, built under today's freeze.
        model: Today's model.
        saved: What `report.state_dict(model, optimizer)` gave then. Needed where `saved_state` has
            numbers in place of names; without the names of the optimizer's parameters in it, the order
            must be the model's, in a single group.

    Returns:
        A state for `optimizer.load_state_dict`.

    Raises:
        FreezeConfigError: The state is no torch optimizer's, the names of its parameters can't be told, or
            parameters of one group were in several.
    """
    if not {"state", "param_groups"} <= saved_state.keys():
        raise FreezeConfigError(
            "this is no state of a torch optimizer: it lacks state and param_groups. Of an optimizer made of "
            "optimizers, move each part's state by itself"
        )
    before = saved_state["param_groups"]
    origins = {
        name: (key, group)
        for group, names in zip(before, _saved_names(saved_state, model, saved), strict=True)
        for key, name in zip(group["params"], names, strict=True)
    }
    result = optimizer.state_dict()
    result["state"] = {}
    for group, names in zip(result["param_groups"], _names(optimizer, model), strict=True):
        groups = [origins[name][1] for name in names if name in origins]
        settings = {key: value for key, value in (groups or [group])[0].items() if key not in _PARAMETERS}
        if any({**other, **settings} != other for other in groups):
            raise FreezeConfigError(
                f"{listing(names)} are in one group of the optimizer now, and were in several with other "
                "settings then: build it with the same groups"
            )
        group.update(settings)
        for key, name in zip(group["params"], names, strict=True):
            if name in origins and origins[name][0] in saved_state["state"]:
                result["state"][key] = saved_state["state"][origins[name][0]]
    return result


_PARAMETERS = ("params", "param_names")


def _names(optimizer: torch.optim.Optimizer, model: Model) -> list[list[str]]:
    """For each group of the optimizer the canonical names of its parameters."""
    names = {id(parameter): name for name, parameter in _parameters(model).items()}
    groups = getattr(optimizer, "param_groups", ())
    if any(id(parameter) not in names for group in groups for parameter in group["params"]):
        raise FreezeConfigError(
            "the optimizer holds parameters that are not the model's (copies or flat ones, perhaps), so that "
            "they have no names: give the model that it trains"
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def _parameters(model: Model) -> dict[str, nn.Parameter]:
    """Each parameter once, by its first name."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in resting_parameters(model)[0].items():
        first.setdefault(id(parameter), (name, parameter))
    return dict(first.values())


def _saved_names(
    saved_state: Mapping[str, Any], model: Model, saved: Mapping[str, Any] | None
) -> list[list[str]]:
    """For each saved group the names of its parameters, from wherever they are."""
    groups: Sequence[Mapping[str, Any]] = saved_state["param_groups"]
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return [list(group["params"]) for group in groups]
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    names: list[list[str]] = list((saved or {}).get("optimizer_names", ()))
    if not names and saved is not None and len(groups) == 1:
        frozen, parameters = _frozen_then(saved), _parameters(model)
        names = [[name for name in parameters if name not in frozen]]
        moments = [saved_state["state"].get(key, {}).get("exp_avg") for key in groups[0]["params"]]
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


def _frozen_then(saved: Mapping[str, Any]) -> dict[str, None]:
    names = saved.get("names") if isinstance(saved, Mapping) else None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FreezeConfigError("saved is not what report.state_dict() gives: it has no list of names")
    return dict.fromkeys(names)
