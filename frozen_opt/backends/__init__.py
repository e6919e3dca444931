"""What frozen_opt asks of a training backend, and which backend a model or an optimizer belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frozen_opt.errors import UnsupportedBackendError

if TYPE_CHECKING:
    from frozen_opt.names import Found, Walk


class Backend:
    """One training backend. Subclass it, override what differs, and `register_backend(MyBackend())`."""

    name: str
    """What the report and the log call it."""

    idle_ranks: bool = False
    """A rank may be left with nothing to train (a pipeline stage), and its optimizer copes."""

    def recognises(self, walk: Walk) -> bool:
        """Does the model run on this backend? `walk.classes` tells what it is made of."""
        raise NotImplementedError

    def refusal(self, walk: Walk, matched: Sequence[Found]) -> str | None:
        """Why freezing `matched` now can't be honoured, and what to do instead; None if it can be.

        Asked before anything changes. A parameter may be frozen already, by a pre-wrap hook, say.
        """
        return None

    def warnings(self, walk: Walk, matched: Sequence[Found]) -> list[str]:
        """What will surprise a user who freezes `matched`, a sentence or two each, with the remedy."""
        return []

    def element_counts(self, walk: Walk, parameters: Sequence[nn.Parameter]) -> list[int]:
        """How many elements each parameter has in full, all its shards together."""
        return [parameter.numel() for parameter in parameters]

    def resting(self, walk: Walk) -> Mapping[int, nn.Parameter]:
        """For parameters that stand in the tree only while they are in use, by id: the lasting ones."""
        return {}

    def elements(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's elements of a parameter at rest, whatever else shares their storage."""
        values = parameter.detach()
        return values.to_local() if hasattr(values, "to_local") else values  # a DTensor's shard

    def optimizer_parameters(self, optimizer: Any) -> Sequence[torch.Tensor] | None:
        """The model's own parameters that `optimizer` steps; None if it is none of this backend's.

        Not the copies or flat buffers that it may hold in their place: identity proves nothing there.

        Raises:
            UnsupportedBackendError: It is one of this backend's, but of a kind that can't be seen into.
        """
        return None


_registered: list[Backend] = []


def register_backend(backend: Backend) -> None:
    """Teach frozen_opt one more backend. It is asked before those that are built in."""
    _registered.insert(0, backend)


@cache
def _built_in() -> tuple[Backend, ...]:
    # Here, not at the top: these files import this one.
    from frozen_opt.backends.deepspeed import DeepSpeedBackend
    from frozen_opt.backends.fsdp import FSDPBackend
    from frozen_opt.backends.megatron import MegatronBackend
    from frozen_opt.backends.plain import TorchBackend

    return (MegatronBackend(), DeepSpeedBackend(), FSDPBackend(), TorchBackend())


def backends() -> Iterator[Backend]:
    """All backends, the most special first; torch itself, which takes any module, comes last."""
    yield from _registered
    yield from _built_in()


def choose_backend(walk: Walk) -> Backend:
    """The backend on which a model runs."""
    return next(backend for backend in backends() if backend.recognises(walk))


def find_optimizers(result: object) -> list[tuple[Any, Sequence[torch.Tensor]]]:
    """Every optimizer in what a factory returned, with the model's parameters that it steps.

    Looks into tuples, lists, mappings and dataclasses, into optimizers made of optimizers, and behind
    attributes with `optim` in their name (learning-rate schedulers, engines).
    """
    optimizers, visited, pending = [], set(), [result]
    while pending:
        item = pending.pop(0)
        if item is None or isinstance(item, torch.Tensor | str | bytes) or id(item) in visited:
            continue
        visited.add(id(item))
        for backend in backends():
            held = backend.optimizer_parameters(item)
            if held is not None:
                optimizers.append((item, held))
                attributes = getattr(item, "__dict__", {})
                pending += [part for part in attributes.values() if _may_hold_optimizers(part)]
                break
        else:
            pending += _parts(item)
    return optimizers


def require_optimizers(result: object) -> list[tuple[Any, Sequence[torch.Tensor]]]:
    """`find_optimizers`, or an error where there is none.

    Raises:
        UnsupportedBackendError: There is no optimizer in `result` that a backend can see into.
    """
    if optimizers := find_optimizers(result):
        return optimizers
    raise UnsupportedBackendError(
        f"the factory returned a {type(result).__module__}.{type(result).__qualname__}, in which frozen_opt "
        "finds no optimizer that it can check: return the optimizer (alone, or in a tuple, list, mapping or "
        "dataclass), or teach frozen_opt your optimizer with register_backend"
    )


def _parts(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, type):
        return []
    # Not every attribute of every object: a data loader may hold a million things.
    every = hasattr(item, "__dataclass_fields__")
    return [
        part
        for name, part in getattr(item, "__dict__", {}).items()
        if (every or "optim" in name) and _may_hold_optimizers(part)
    ]


def _may_hold_optimizers(part: object) -> bool:
    """Optimizers, and containers with one in them; not the state and the groups of an optimizer."""
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, list | tuple):
        return any(_is_optimizer(item) for item in part)
    return _is_optimizer(part)


def _is_optimizer(item: object) -> bool:
    if isinstance(item, torch.Tensor):
        return False
    return any(backend.optimizer_parameters(item) is not None for backend in backends())


# It registers how Megatron numbers layers and experts: names must be right before a backend is asked.
import frozen_opt.backends.megatron  # noqa: E402, F401
