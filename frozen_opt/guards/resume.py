"""What a checkpoint holds of a freeze, and whether a run that resumes from it has the same one.

torch knows the parameters of an optimizer by number alone. With another freeze list the numbers mean other
parameters: at best loading fails, at worst each gets its neighbour's moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from frozen_opt.errors import FreezeConfigError, ResumeMismatchError, listing
from frozen_opt.parameters import Model, parameters_once

if TYPE_CHECKING:
    from frozen_opt.reports.freeze_report import FreezeReport


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
        "optimizer_names": [] if model is None or optimizer is None else optimizer_names(optimizer, model),
    }


def check_resume(report: FreezeReport, saved: Mapping[str, Any]) -> None:
    """What `FreezeReport.check_resume` says."""
    then, now = frozen_then(saved), dict.fromkeys(report.names)
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


def frozen_then(saved: Mapping[str, Any]) -> dict[str, None]:
    """The names that were frozen, from what `report.state_dict()` gave.

    Raises:
        FreezeConfigError: `saved` is something else.
    """
    names = saved.get("names") if isinstance(saved, Mapping) else None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FreezeConfigError("saved is not what report.state_dict() gives: it has no list of names")
    return dict.fromkeys(names)


def optimizer_names(optimizer: torch.optim.Optimizer, model: Model) -> list[list[str]]:
    """For each group of the optimizer the canonical names of its parameters.

    Raises:
        FreezeConfigError: Some are not the model's.
    """
    names = {id(parameter): name for name, parameter in parameters_once(model).items()}
    groups = getattr(optimizer, "param_groups", ())
    if any(id(parameter) not in names for group in groups for parameter in group["params"]):
        raise FreezeConfigError(
            "the optimizer holds parameters that are not the model's (copies or flat ones, perhaps), so that "
            "they have no names: give the model that it trains"
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]
