"""DeepSpeed: ZeRO 0 to 3, `zero.Init` and pipelines, frozen before `deepspeed.initialize`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from frozen_opt.backends.base import Backend
from frozen_opt.backends.optimizer_search import find_optimizers
from frozen_opt.backends.plain import surprises
from frozen_opt.errors import UnsupportedBackendError, listing
from frozen_opt.matching.names import Found, Walk

# Named, not imported: a process that never imports DeepSpeed holds none of its objects.
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_PIPELINE = "deepspeed.runtime.pipe.module.PipelineModule"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload"
# Under these names DeepSpeed's optimizers list the model's own parameters. Their param_groups hold flat
# copies, in which nothing can be told apart.
_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")


class DeepSpeedBackend(Backend):
    """DeepSpeed leaves frozen parameters alone, if they were frozen when it took the optimizer over."""

    name = "deepspeed"

    def recognises(self, walk: Walk) -> bool:
        if "deepspeed" not in sys.modules:
            return False
        return not walk.classes.isdisjoint((_ENGINE, _PIPELINE)) or any(
            hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping") for parameter in walk.parameters
        )

    def refusal(self, walk: Walk, matched: Sequence[Found]) -> str | None:
        held = {
            id(parameter)
            for engine in walk.wrappers
            for _, parameters in find_optimizers(engine)
            for parameter in parameters
        }
        if held and held.isdisjoint(map(id, walk.parameters)):
            return (
                "DeepSpeed's optimizer shows none of the model's parameters, so that nothing can be told of "
                "it: teach frozen_opt this optimizer with register_backend"
            )
        held |= _marked(walk.parameters)
        names = [found.name for found in matched if id(found.parameter) in held]
        if not names:
            return None
        return (
            f"DeepSpeed's optimizer already holds {listing(names)}, and would go on moving them: freeze "
            "before deepspeed.initialize (frozen_opt.freeze_parameters, or decorate the function that "
            "builds the optimizer and calls it)"
        )

    def thaw_refusal(self, walk: Walk, thawed: Sequence[Found]) -> str | None:
        if _ENGINE not in walk.classes and not _marked(walk.parameters):
            return None  # no engine has taken the optimizer over yet
        return (
            f"DeepSpeed's optimizer was built without {listing([found.name for found in thawed])}, which the "
            "list no longer freezes, and can't take it in: call with the new list on the bare model "
            "(engine.module), and deepspeed.initialize it anew"
        )

    def warnings(self, walk: Walk, matched: Sequence[Found]) -> list[str]:
        return surprises(walk, matched)

    def element_counts(self, walk: Walk, parameters: Sequence[nn.Parameter]) -> list[int]:
        # Under ZeRO 3 a parameter that is not in use has no elements
        counts = zip(parameters, super().element_counts(walk, parameters), strict=True)
        return [getattr(parameter, "ds_numel", count) for parameter, count in counts]

    def elements(self, parameter: torch.Tensor) -> torch.Tensor:
        # Under ZeRO 3 the lasting values are this rank's partition; the last ones end in padding.
        zero: Any = parameter
        if not hasattr(zero, "ds_tensor"):
            return super().elements(parameter)
        shard: torch.Tensor = zero.ds_tensor
        if shard.numel() < zero.ds_tensor.ds_numel:  # swapped out to disk
            raise UnsupportedBackendError(
                "ZeRO has moved parameters to disk, where their values can't be read: offload to the CPU"
            )
        start = zero.ds_tensor.ds_numel * torch.distributed.get_rank(zero.ds_process_group)
        return shard.detach().flatten()[: max(0, zero.ds_numel - start)]

    def optimizer_parameters(self, optimizer: Any) -> Sequence[torch.Tensor] | None:
        bases = [cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("deepspeed.")]
        if any(f"{cls.__module__}.{cls.__qualname__}" == _OFFLOAD for cls in bases):
            return []  # stands in the optimizer's place when there is none
        if not any(cls.__name__ == "DeepSpeedOptimizer" for cls in bases):
            return None
        groups = [getattr(optimizer, name) for name in _GROUPS if hasattr(optimizer, name)]
        return [parameter for kind in groups for group in kind for parameter in group] if groups else None


def _marked(parameters: Sequence[nn.Parameter]) -> set[int]:
    """Ids of what ZeRO's optimizers hold, by their marks: the engine is not at hand inside it."""
    stage3 = {id(mark): mark for p in parameters if (mark := getattr(p, "_z3_optimizer", None)) is not None}
    return {
        *(id(parameter) for parameter in parameters if hasattr(parameter, "_hp_mapping")),
        *(id(parameter) for mark in stage3.values() for group in mark.fp16_groups for parameter in group),
    }
