"""What trainers ask for and a CPU does not have, each with its reason. Call in a rank, never in pytest."""

import collections
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import typing_extensions


def accelerate_fsdp() -> None:
    """FSDP in accelerate: it takes its FSDP plugin only where the ranks have accelerators."""
    from accelerate.state import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def torchtitan() -> None:
    """Its device is found at import, and CUDA where there is no accelerator; that is asked for its memory."""
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
        import torchtitan.distributed.minimal_async_ep.kernels
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


def cuda() -> None:
    """Trainers ask for CUDA by name: its tensors come from the CPU, and its device is the CPU.

    By functions in place of torch's, not by a mode: modes hold for one thread, and actors have several.
    """
    import torch
    import torch.distributed as dist
    import torch.utils._device

    def on_cpu(function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return call

    torch.utils._device._device_constructors()  # remembers the real ones, for `with torch.device("meta")`
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "zeros_like", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.device_count = lambda: 1
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all", "ipc_collect"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_: 0)
    torch.cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)
    mesh = dist.device_mesh.init_device_mesh
    dist.device_mesh.init_device_mesh = dist.init_device_mesh = lambda _, *args, **kwargs: mesh(
        "cpu", *args, **kwargs
    )
    start = dist.init_process_group
    dist.init_process_group = lambda _=None, **kwargs: start(**kwargs | {"backend": "gloo"})


def skyrl() -> None:
    """SkyRL 0.4 on Python 3.11 and a CPU. Ray calls it in each worker that it starts."""
    cuda()
    if sys.version_info < (3, 12):  # pydantic takes no other below, and SkyRL asks for 3.12
        typing.TypedDict = typing_extensions.TypedDict
    padding = module("flash_attn.bert_padding")  # imported always, called with flash attention only
    padding.pad_input = padding.unpad_input = None
    # It pins transformers below 5.17, where this name stood elsewhere.
    from transformers import modeling_utils
    from transformers.initialization import no_init_weights

    modeling_utils.no_init_weights = no_init_weights
    # Weights go to vLLM, of which the sender takes three names.
    weights = module("vllm.distributed.weight_transfer.base")
    weights.WeightSource = object
    weights.ParamMeta = collections.namedtuple("ParamMeta", "name dtype shape")
    weights.materialize_full_tensor = lambda tensor: getattr(tensor, "full_tensor", lambda: tensor)()


def verl() -> None:
    """A platform: verl 0.9 has one for each kind of accelerator, and none for the CPU."""
    cuda()
    import torch
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name = "cpu"

        def current_device(self) -> Any:
            return torch.device("cpu")

        def is_available(self) -> bool:
            return True

    platform_manager.set_platform(Cpu())
    from torch.distributed.fsdp import _init_utils

    _init_utils._check_module_states_for_sync_module_states = lambda _: None  # FSDP1 wants them on a GPU
    # It pins transformers below 5.11, and names a class of it that is gone: of vision models.
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    modeling_qwen2_vl.Qwen2VLCausalLMOutputWithPast = None
    # It asks whether a model is TRL's with a value head, which TRL has no more.
    module("trl.experimental.ppo").AutoModelForCausalLMWithValueHead = type("None", (), {})
    from verl.utils import fsdp_utils

    # Both ways lead to the CPU; the device to which the other one moves has a number in its name.
    fsdp_utils.load_fsdp_model_to_gpu = fsdp_utils.offload_fsdp_model_to_cpu


def module(name: str) -> Any:
    """An empty module of this name, and the packages that it is in."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        created = sys.modules.setdefault(path, ModuleType(path))
        created.__spec__ = created.__spec__ or ModuleSpec(path, None)
        created.__path__ = []
    return sys.modules[name]


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
