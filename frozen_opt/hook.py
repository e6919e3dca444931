"""`freezing_hook`: freeze while a framework builds and wraps a model in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from frozen_opt.matching.names import module_list
from frozen_opt.matching.selection import NameMap
from frozen_opt.parameters import named_parameters
from frozen_opt.plan import freeze_parameters, make_plan
from frozen_opt.ranks import collectives

Model = TypeVar("Model")


def freezing_hook(
    role: str, patterns: Sequence[str] | None, *, name_map: NameMap = None, group: collectives.Group = None
) -> Callable[..., Any]:
    """A pre-wrap hook that freezes: gets the model, or a list of chunks, and returns the same.

    For Megatron-Bridge, `provider.register_pre_wrap_hook(...)`, which hands over all chunks; and for
    `post_model_creation_callbacks` of mbridge, which get one chunk at a time, with keywords that are not
    read. Where chunks come one by one, the hook can't know whether more follow: a pattern that matches in
    none so far becomes an error of the decorated factory, of `report` and of `metrics`. A factory that is
    decorated with the same role and list then proves the freeze.

    Arguments and errors are those of `plan_freezing`.
    """
    chunks: list[nn.Module] = []  # those of one model, as long as the hook lives

    def hook(model: Model, **_: Any) -> Model:
        if isinstance(model, list | tuple):
            freeze_parameters(model, patterns, role=role, name_map=name_map, group=group)
            return model
        (chunk,) = module_list(model)
        names = {name for name, _ in named_parameters(chunk)}
        chunks[:] = [
            other
            for other in chunks
            if names.isdisjoint(name for name, _ in named_parameters(other))  # else it is another model's
        ]
        chunks.append(chunk)
        plan = make_plan(
            lambda: list(chunks),
            lambda: patterns,
            role=role,
            name_map=name_map,
            group=group,
            more_to_come=True,
        )
        plan.apply_now()
        return model

    return hook
