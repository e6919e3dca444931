"""PyTorch FSDP: FSDP2 (`fully_shard`), and FSDP1 that keeps the original parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from frozen_opt.backends.base import Backend
from frozen_opt.backends.ddp import wrapped_too_early, wrapped_without
from frozen_opt.backends.plain import surprises
from frozen_opt.errors import UnsupportedBackendError
from frozen_opt.matching.names import Found, Walk

# Named, not imported: that takes half a second, and a process that never imports FSDP holds none.
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp.FSDPModule"


class FSDPBackend(Backend):
    """FSDP2 needs no help: its DTensors are parameters like any other, and `numel()` is that of the whole.

    Frozen before or after `fully_shard`, one unit may mix frozen and trainable parameters. The same is
    true of FSDP1 with `use_orig_params=True`, whose parameters are views of a flat one: a view without
    requires_grad gets no gradient, so that the optimizer leaves its part of the flat parameter alone.
    """

    name = "fsdp"

    def recognises(self, walk: Walk) -> bool:
        if "torch.distributed.fsdp" not in sys.modules:
            return False
        return not walk.classes.isdisjoint((_FSDP1, _FSDP2)) or any(map(_from_flat, walk.parameters))

    def refusal(self, walk: Walk, matched: Sequence[Found]) -> str | None:
        if any(getattr(parameter, "_is_flat_param", False) for parameter in walk.parameters):
            return (
                "FullyShardedDataParallel with use_orig_params=False has put the parameters into flat ones, "
                "and their names are gone: use FSDP2 (torch.distributed.fsdp.fully_shard), or wrap with "
                "use_orig_params=True"
            )
        gathered = self.resting(walk)
        if any(id(parameter) in gathered for parameter in walk.parameters):
            return (
                "FSDP2 shows gathered parameters since a forward that no backward followed, and neither a "
                "freeze nor an optimizer would reach the shards: call reshard() on each FSDPModule in the "
                "model first"
            )
        return wrapped_too_early(walk, matched)  # DDP may wrap what FSDP has sharded in part

    def thaw_refusal(self, walk: Walk, thawed: Sequence[Found]) -> str | None:
        return wrapped_without(walk, thawed)

    def warnings(self, walk: Walk, matched: Sequence[Found]) -> list[str]:
        return surprises(walk, matched)

    def element_counts(self, walk: Walk, parameters: Sequence[nn.Parameter]) -> list[int]:
        # On a rank that holds no element of a parameter its view is empty; only the flat one knows.
        whole: dict[int, int] = {}
        for wrapper in walk.wrappers:
            if (flat := getattr(wrapper, "_flat_param", None)) is not None:
                whole.update(zip(map(id, flat._params), flat._numels, strict=True))
        unknown = [p for p in parameters if _from_flat(p) and id(p) not in whole]
        if unknown:
            raise UnsupportedBackendError(
                "this module is the inside of a FullyShardedDataParallel, which alone knows how large its "
                "parameters are: pass the FullyShardedDataParallel itself"
            )
        counts = zip(parameters, super().element_counts(walk, parameters), strict=True)
        return [whole.get(id(parameter), count) for parameter, count in counts]

    def resting(self, walk: Walk) -> Mapping[int, nn.Parameter]:
        # A forward that no backward follows leaves FSDP2's gathered parameters of the root in the tree.
        if _FSDP2 not in walk.classes:
            return {}
        modules: list[Any] = [module for chunk in walk.chunks for module in chunk.modules()]
        return {
            id(gathered): parameter.sharded_param
            for module in modules
            if hasattr(module, "_get_fsdp_state")
            for parameter in _fsdp2_parameters(module._get_fsdp_state())
            for gathered in (
                getattr(parameter, "_unsharded_param", None),
                getattr(parameter, "_sharded_post_forward_param", None),
            )
            if gathered is not None
        }


def _fsdp2_parameters(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer; one group before
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [parameter for group in groups for parameter in group.fsdp_params]


def _from_flat(parameter: nn.Parameter) -> bool:
    """FSDP1 marks what it has flattened."""
    return getattr(parameter, "_fsdp_flattened", False)
