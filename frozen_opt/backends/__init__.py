"""What frozen_opt asks of a training backend, and which backend a model or an optimizer belongs to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frozen_opt.backends.quantized import element_counts, stored_elements
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

    def thaw_refusal(self, walk: Walk, thawed: Sequence[Found]) -> str | None:
        """Why `thawed`, which was frozen until now, can't train from now on, and what to do; None if it can.

        Asked before anything changes.
        """
        return None

    def warnings(self, walk: Walk, matched: Sequence[Found]) -> list[str]:
        """What will surprise a user who freezes `matched`, a sentence or two each, with the remedy."""
        return []

    def element_counts(self, walk: Walk, parameters: Sequence[nn.Parameter]) -> list[int]:
        """How many elements each parameter has in full, all its shards together."""
        return element_counts(walk, parameters)

    def resting(self, walk: Walk) -> Mapping[int, nn.Parameter]:
        """For parameters that stand in the tree only while they are in use, by id: the lasting ones."""
        return {}

    def elements(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a parameter at rest, whatever else shares their storage.

        Raises:
            UnsupportedBackendError: They can't be read.
        """
        return stored_elements(parameter)

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

    Looks into containers and a few attributes deep into objects, whatever the attributes are called: tuples
    and dataclasses, optimizers made of optimizers, schedulers, wrappers. Of a module it looks at attributes
    with `optim` in their name alone (engines), and not at all behind an optimizer whose backend answers with
    the model's parameters in place of what the optimizer holds: that would be copies.
    """
    optimizers: list[tuple[Any, Sequence[torch.Tensor]]] = []
    visited: set[int] = set()
    pending = deque([(result, 0)])
    while pending:
        item, depth = pending.popleft()
        if isinstance(item, _LEAVES) or id(item) in visited:
            continue
        visited.add(id(item))
        backend, held = _ask_backends(item)
        if held is not None:
            optimizers.append((item, held))
        if isinstance(item, dict | list | tuple | set | frozenset | deque):
            pending.extend((part, depth) for part in _contents(item))
        elif depth < _DEPTH and (held is None or backend is _built_in()[-1]):
            pending.extend((part, depth + 1) for part in _attributes(item))
    return optimizers


_LEAVES = (
    *(torch.Tensor, torch.Size, torch.device, torch.dtype, str, bytes, int, float, complex, type(None)),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
)
_DEPTH = 4
_MANY = 1000


def _ask_backends(item: object) -> tuple[Backend | None, Sequence[torch.Tensor] | None]:
    for backend in backends():
        if (held := backend.optimizer_parameters(item)) is not None:
            return backend, held
    return None, None


def _contents(container: Any) -> Iterable[Any]:
    items = container.values() if isinstance(container, dict) else container
    # A data set may be a list of millions; optimizers that are many (one a parameter) stand together.
    if len(container) > _MANY and _ask_backends(next(iter(items)))[1] is None:
        return ()
    return items


def _attributes(item: object) -> list[Any]:
    """What an object holds, without running any code of its own: neither properties nor `__getattr__`."""
    held = dict(getattr(item, "__dict__", {})) if type(item).__dictoffset__ else {}
    for cls in type(item).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):  # of __slots__
                with suppress(AttributeError):
                    held.setdefault(name, member.__get__(item))
    if isinstance(item, nn.Module):
        return [part for name, part in held.items() if "optim" in name]
    # The groups of an optimizer are what its backend has looked at, its state is large.
    return [part for name, part in held.items() if name not in ("param_groups", "state", "defaults")]


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


# These must be there before a backend is asked: how Megatron numbers layers and experts, for names to be
# right, and an eye on the DDPs that are made from now on.
import frozen_opt.backends.ddp  # noqa: E402
import frozen_opt.backends.megatron  # noqa: E402, F401
