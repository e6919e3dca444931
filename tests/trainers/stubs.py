"""What trainers ask for and a CPU does not have, each with its reason. Call in a rank, never in pytest."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


def accelerate_fsdp() -> None:
    """accelerate takes its FSDP plugin only where the ranks have accelerators."""
    from accelerate.state import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def torchtitan() -> None:
    """Its device is found at import, and is CUDA where there is no accelerator; it asks that for its memory."""
    import torch

    if "torchtitan" in sys.modules:
        return
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda _=None: "CPU"
    torch.cpu.get_device_properties = lambda _=None: SimpleNamespace(total_memory=1 << 30)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    torch.cpu.memory_stats = lambda _=None: {}
    torch.cpu.set_device = lambda _: None

    # Gloo has no sum with a factor: torch's FSDP2 then divides by itself.
    from torch.distributed.fsdp import FSDPModule

    set_factor = FSDPModule.set_gradient_divide_factor

    def divide_here(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        set_factor(module, factor)

    FSDPModule.set_gradient_divide_factor = divide_here
    with _absent("triton", "triton.language"):  # kernels of one expert-parallel dispatcher, for a GPU
        import torchtitan.distributed.minimal_async_ep.kernels  # noqa: F401
    import torchtitan.distributed.utils

    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # by a barrier on a device

    # It hands over micro-batches, as torch takes them from 2.14 on.
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    step_whole = PipelineScheduleSingle.step

    def step(
        self: Any, *, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **more: Any
    ) -> Any:
        args = [torch.cat(parts) for parts in zip(*arg_mbs or [], strict=True)]
        kwargs = {name: torch.cat([each[name] for each in kwarg_mbs]) for name in kwarg_mbs[0]}
        return step_whole(self, *args, target=torch.cat(target_mbs) if target_mbs else None, **kwargs, **more)

    PipelineScheduleSingle.step = step


class _Anything(ModuleType):
    """A module whose attributes are decorators that decorate nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args and callable(args[0]) else self.__getattr__(name)


@contextmanager
def _absent(*names: str) -> Iterator[None]:
    """Empty modules of these names, while something imports them."""
    sys.modules |= {name: _Anything(name) for name in names}
    for name in names:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]  # or torch believes that it is there
