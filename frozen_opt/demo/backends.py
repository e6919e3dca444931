"""`trainer.strategy` of the demo: a model wrapped for a backend, its optimizer, and the ranks they are on.

Each strategy is a plain factory, and `with_freezing` decorates it as it stands: the parameters are frozen
when its body wraps the model, which is what DDP and DeepSpeed ask for.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frozen_opt.commands.bad_input import BadInput
from frozen_opt.optimizers_by_name import build_deepspeed_optimizer, build_optimizer


class Wrapped(NamedTuple):
    """What a strategy makes of a model."""

    model: nn.Module
    optimizer: Any
    descend: Callable[[Tensor], float]
    """Takes one step down the gradient of a loss, averaged over the ranks; gives the gradient's norm."""


def wrap_torch(model: nn.Module, config: Any) -> Wrapped:
    """One process, and the model as it is."""
    return _with_torch_step(model, build_optimizer(model, config), config)


def wrap_ddp(model: nn.Module, config: Any) -> Wrapped:
    """DistributedDataParallel, whose reducer waits for none of the gradients that are frozen by now."""
    wrapped = DistributedDataParallel(model)
    return _with_torch_step(wrapped, build_optimizer(wrapped, config), config)


def wrap_fsdp2(model: nn.Module, config: Any) -> Wrapped:
    """`fully_shard` for each layer, and for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    body: Any = model.model
    for layer in body.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _with_torch_step(model, build_optimizer(model, config), config)


def wrap_deepspeed(model: nn.Module, config: Any) -> Wrapped:
    """ZeRO 2. The engine clips, steps, and clears the gradients."""
    os.environ.setdefault("DS_ACCELERATOR", next(model.parameters()).device.type)
    try:
        from deepspeed import initialize
    except ModuleNotFoundError as error:
        raise BadInput("trainer.strategy=deepspeed needs DeepSpeed: pip install deepspeed") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of its calls
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # only its timers read it
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": config.optimizer_config.max_grad_norm,
    }
    client = build_deepspeed_optimizer(model, config)
    with redirect_stdout(io.StringIO()):  # every rank prints what it builds
        engine, optimizer, *_ = initialize(model=model, optimizer=client, config=settings)

    def descend(loss: Tensor) -> float:
        engine.backward(loss)
        engine.step()
        return float(engine.get_global_grad_norm())

    return Wrapped(engine, optimizer, descend)


STRATEGIES: dict[str, Callable[[nn.Module, Any], Wrapped]] = {
    "torch": wrap_torch,
    "ddp": wrap_ddp,
    "fsdp2": wrap_fsdp2,
    "deepspeed": wrap_deepspeed,
}


def rebuild(wrapped: Wrapped, config: Any) -> Wrapped:
    """Another optimizer over a model that is wrapped already, for another freeze list."""
    optimizer = build_optimizer(wrapped.model, config)
    return _with_torch_step(wrapped.model, optimizer, config)


def _with_torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, config: Any) -> Wrapped:
    max_norm = config.optimizer_config.max_grad_norm or math.inf

    def descend(loss: Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # FSDP2's is a DTensor

    return Wrapped(model, optimizer, descend)


@contextmanager
def launched(config: Any) -> Iterator[None]:
    """The process group that `trainer.strategy` needs, for as long as the body runs.

    Raises:
        BadInput: torchrun is missing, or too much, or its ranks don't fit the config.
    """
    trainer = config.trainer
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if trainer.strategy == "torch":
        if ranks > 1:
            raise BadInput(
                f"trainer.strategy=torch is for one process, and {ranks} were launched: choose one of "
                f"{[name for name in STRATEGIES if name != 'torch']}"
            )
        yield
        return
    if not os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        raise BadInput(
            f"trainer.strategy={trainer.strategy} runs on ranks, which torchrun launches:\n"
            f"torchrun --nproc-per-node 2 -m frozen_opt demo trainer.strategy={trainer.strategy}"
        )
    if trainer.train_batch_size % ranks:
        raise BadInput(
            f"trainer.train_batch_size is {trainer.train_batch_size}, and must be a multiple of {ranks}, "
            "the number of ranks"
        )
    try:
        device = torch.device(trainer.device)
        if not torch.get_device_module(device).is_available():
            raise RuntimeError("there is none here")
        if device.index is not None:
            raise RuntimeError(f"write {device.type}, and each rank takes its own")
        torch.get_device_module(device).set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group(dist.get_default_backend_for_device(device))
    except Exception as error:  # torch's as well
        raise BadInput(f"no ranks on trainer.device={trainer.device}: {shorten(str(error), 200)}") from error
    yield
    # Not after an error: others may wait in a collective, which this would join. Nor gloo's: torch 2.6 may
    # wait for its thread for ever, and holds the GIL that the thread needs to drop its last work.
    if dist.get_backend() != "gloo":
        dist.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def average(values: Tensor) -> Tensor:
    """The mean over the ranks."""
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values
