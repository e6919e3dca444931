"""torch itself: any module, eager, compiled, checkpointed, tied, in DDP; and any torch optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper

from frozen_opt.backends.base import Backend
from frozen_opt.backends.buffers import moving_buffers
from frozen_opt.backends.ddp import wrapped_too_early, wrapped_without
from frozen_opt.errors import listing
from frozen_opt.matching.names import Found, Walk


class TorchBackend(Backend):
    """Takes whatever no other backend has recognised."""

    name = "torch"

    def recognises(self, walk: Walk) -> bool:
        return True

    def refusal(self, walk: Walk, matched: Sequence[Found]) -> str | None:
        return wrapped_too_early(walk, matched)

    def thaw_refusal(self, walk: Walk, thawed: Sequence[Found]) -> str | None:
        return wrapped_without(walk, thawed)

    def warnings(self, walk: Walk, matched: Sequence[Found]) -> list[str]:
        return surprises(walk, matched)

    def optimizer_parameters(self, optimizer: Any) -> Sequence[torch.Tensor] | None:
        kind = type(optimizer)
        # A look-up on the instance might run code of its own: a proxy's `__getattr__`, say.
        own = vars(optimizer) if kind.__dictoffset__ else {}
        if "param_groups" not in own and not hasattr(kind, "param_groups"):
            return None
        groups = optimizer.param_groups  # it may be a property
        if isinstance(optimizer, nn.Module) or not isinstance(groups, list | tuple):
            return None
        return [parameter for group in groups for parameter in group["params"]]


def surprises(walk: Walk, matched: Sequence[Found]) -> list[str]:
    """What surprises a user of torch, on any backend that runs torch's own modules."""
    return [*moving_buffers(walk, matched), *_reentrant_checkpointing(walk, matched)]


def _reentrant_checkpointing(walk: Walk, matched: Sequence[Found]) -> list[str]:
    """Reentrant checkpointing passes gradients only where an input of the segment requires one."""
    embeddings = [found.name for found in matched if isinstance(found.owner, nn.Embedding)]
    if not embeddings:
        return []
    modules = [module for chunk in walk.chunks for module in chunk.modules()]
    # What transformers' enable_input_require_grads() leaves behind; the first name is that of version 4.
    hooks = ("_require_grads_hook", "_require_grads_hooks")
    if any(getattr(module, hook, None) for module in modules for hook in hooks):
        return []
    if not any(_checkpoints_reentrantly(module) for module in modules):
        return []
    return [
        f"{listing(embeddings)} is frozen under reentrant activation checkpointing (use_reentrant=True): "
        "with inputs that require no gradient, no checkpointed layer gets one. Use use_reentrant=False, "
        "or call model.enable_input_require_grads()"
    ]


def _checkpoints_reentrantly(module: nn.Module) -> bool:
    if isinstance(module, CheckpointWrapper):
        return module.checkpoint_impl is CheckpointImpl.REENTRANT
    # transformers: each layer that checkpoints itself holds the function, its arguments bound
    function = getattr(module, "_gradient_checkpointing_func", None)
    if not getattr(module, "gradient_checkpointing", False) or not isinstance(function, partial):
        return False
    return bool(function.keywords.get("use_reentrant", True))
