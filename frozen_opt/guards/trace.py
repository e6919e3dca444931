"""What an optimizer's saved state tells of the freeze list under which it was saved.

A decorated factory with a list leaves a trace in the optimizers that it builds: a digest of the frozen names
in each param group, which every form of saved state carries along, and, beside `state` and `param_groups`,
the names. A state of another list is then refused before anything of it is loaded; one without a trace is
loaded as before, with a warning. In an optimizer that no factory of ours built, a trace changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
import wrapt
from loguru import logger

from frozen_opt.errors import ResumeMismatchError
from frozen_opt.reports.freeze_report import FreezeReport

KEY = "frozen_opt"
_HANDLES = "_frozen_opt_hooks"


def leave_trace(optimizer: object, report: FreezeReport, names: Mapping[int, str]) -> None:
    """Let an optimizer's state tell its freeze list, and let it refuse the state of another one.

    Args:
        optimizer: One that a factory built; only those of torch have states that can be told apart.
        report: What is frozen.
        names: id of each parameter of the model -> its canonical name.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or "_optimizer_state_dict_post_hooks" not in vars(
        optimizer
    ):
        return  # the second: one made of optimizers, which never called the constructor of torch's
    _let_checkpoints_lack_traces()
    for handle in vars(optimizer).get(_HANDLES, ()):  # of an earlier call
        handle.remove()
    for group in optimizer.param_groups:
        group[KEY] = _digest(report)
    members = [
        [names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups
    ]
    known = all(all(group) for group in members)  # else it trains more than the model
    told = {**report.state_dict(), "optimizer_names": members if known else []}

    def save(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[KEY] = told

    def load(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        refuse_another_list(report, state)

    hooks = optimizer.register_state_dict_post_hook(save), optimizer.register_load_state_dict_pre_hook(load)
    setattr(optimizer, _HANDLES, hooks)


def refuse_another_list(report: FreezeReport, state: Mapping[str, Any]) -> None:
    """Raise if an optimizer's state was saved under another freeze list; warn if it does not tell.

    Raises:
        ResumeMismatchError: It was.
    """
    if isinstance(saved := state.get(KEY), Mapping):
        report.check_resume(saved)
    traces = {group.get(KEY) for group in state.get("param_groups", ())} - {None}
    if not traces and saved is None:
        logger.bind(role=report.role).warning(
            "{}: the optimizer's state that is being loaded has no trace of its freeze list, so it could not "
            "be checked that it was saved under {}: of another list, parameters may get their neighbours' "
            "moments",
            report.role,
            list(report.patterns),
        )
    if traces - {_digest(report)}:
        raise ResumeMismatchError(
            f"role {report.role!r}: the optimizer's state was saved under another freeze list than "
            f"{list(report.patterns)}. Build the optimizer with that list and load; then call the factory "
            "with the new list, and move the state with frozen_opt.migrate_optimizer_state"
        )


def _digest(report: FreezeReport) -> str:
    return hashlib.blake2b(json.dumps(sorted(report.names)).encode(), digest_size=8).hexdigest()


@cache
def _let_checkpoints_lack_traces() -> None:
    """torch.distributed.checkpoint loads what the state to load into has keys for, and misses none.

    A checkpoint without traces shall load as before, so the keys of ours that it lacks are left out.
    """

    def patch(module: ModuleType) -> None:
        wrapt.wrap_function_wrapper(module, "DefaultLoadPlanner.create_local_plan", _leave_out)

    wrapt.register_post_import_hook(patch, "torch.distributed.checkpoint.default_planner")


def _leave_out(wrapped: Callable[..., Any], planner: Any, args: Any, kwargs: Any) -> Any:
    from torch.distributed.checkpoint._traverse import set_element

    known = planner.metadata.state_dict_metadata
    for key in [key for key in planner.state_dict if key.endswith(f".{KEY}") and key not in known]:
        del planner.state_dict[key]
        set_element(planner.original_state_dict, planner.mappings[key], None)
    return wrapped(*args, **kwargs)
