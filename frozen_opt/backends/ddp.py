"""DistributedDataParallel: what its reducer waits for, also where only the model inside it is at hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from frozen_opt.errors import listing
from frozen_opt.matching.living_ddps import living
from frozen_opt.matching.names import Found, Walk


def wrapped_too_early(walk: Walk, matched: Sequence[Found]) -> str | None:
    """Why a DDP that wraps the model, or a part of it, can't honour the freeze, if it can't."""
    for wrapper in _around(walk, matched):
        if wrapper.find_unused_parameters or wrapper.static_graph:
            continue
        inside = set(map(id, wrapper._module_parameters))
        names = [found.name for found in matched if id(found.parameter) in inside]
        # The reducer was built for what required a gradient then. What was frozen before is not in
        # it; what was frozen since, by hand, shows as a tensor too many.
        late = any(found.parameter.requires_grad for found in matched) or _held(wrapper) > _trainable(wrapper)
        if names and late:
            return (
                f"DistributedDataParallel already wraps {listing(names)}, and its reducer would wait "
                "for their gradients for ever: freeze before wrapping (frozen_opt.freeze_parameters, "
                "then DDP), or wrap with find_unused_parameters=True or static_graph=True"
            )
    return None


def wrapped_without(walk: Walk, thawed: Sequence[Found]) -> str | None:
    """Why a DDP that has no place for a parameter can't train it from now on, if there is such a one."""
    for wrapper in _around(walk, thawed):
        inside = set(map(id, wrapper._module_parameters))
        names = [found.name for found in thawed if id(found.parameter) in inside]
        if (without := living.get(wrapper)) is not None:
            names = [found.name for found in thawed if id(found.parameter) in without]
        elif _held(wrapper) >= _trainable(wrapper) + len(names):
            continue  # it was made before frozen_opt was imported, and there is a place for all
        if names:
            return (
                f"DistributedDataParallel was laid out without {listing(names)}, which the list no longer "
                "freezes: it would not average their gradients, and the ranks would drift apart. Take the "
                "model out of DistributedDataParallel, call with the new list, and wrap it anew"
            )
    return None


def _around(walk: Walk, touched: Sequence[Found]) -> Iterator[Any]:
    """The DDPs in the model, and those around it that hold a parameter to be touched."""
    here = [wrapper for wrapper in walk.wrappers if isinstance(wrapper, DistributedDataParallel)]
    yield from here
    if not living:
        return
    ids = {id(found.parameter) for found in touched}

    def outside() -> list[Any]:
        return [
            wrapper
            for wrapper in living
            if wrapper not in here and not ids.isdisjoint(map(id, getattr(wrapper, "_module_parameters", ())))
        ]

    if outside():
        gc.collect()  # one that was dropped may be held by its own cycles
        yield from outside()


def _held(wrapper: Any) -> int:
    """For how many tensors the reducer has a place."""
    return int(wrapper.logger._get_ddp_logging_data().ints_map["num_parameter_tensors"])


def _trainable(wrapper: Any) -> int:
    return sum(parameter.requires_grad for parameter in wrapper._module_parameters)
