"""Sharded models that are moved to the CPU and back, swapped, saved and loaded, between steps, while frozen.

`Module.to()` moves DTensors by `torch.utils.swap_tensors`, which refuses tensors that have weak references.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import frozen_opt
from tests.models import Transformer, moved, snapshot, train, transformer
from tests.ranks.launch import run_ranks

PATTERNS = ["*.mlp.gate.weight", "*.attention.weight"]
FROZEN = {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("attention", "mlp.gate")}


def fsdp2() -> Transformer:
    model = transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel() -> Transformer:
    """A matrix of each layer by columns that is frozen, and one that is not; the rest is on each rank."""
    model = transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = ColwiseParallel(output_layouts=Replicate())
    for layer in model.layers:
        parallelize_module(layer, mesh, {"attention": whole, "mlp.experts.0": whole})
    return model


def swap(model: nn.Module) -> None:
    """As offload by swapping does: each parameter gives way to a copy of itself."""
    for parameter in model.parameters():
        copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, copied)


def there_and_back(model: nn.Module) -> None:
    model.to("cpu", non_blocking=True)
    model.to(torch.float64)
    model.to(torch.float32)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in frozen_opt.named_parameters(model)
    }


def run(build: Callable[[], Transformer], move: Callable[[nn.Module], None]) -> set[str]:
    model = build()
    plan = frozen_opt.plan_freezing(model, PATTERNS, role="policy")
    decorate = frozen_opt.with_freezing("policy", patterns=PATTERNS)

    def factory(model: nn.Module) -> torch.optim.Optimizer:
        move(model)  # inside the factory as well
        return torch.optim.AdamW(frozen_opt.trainable_parameters(model), weight_decay=0.1)

    optimizer = decorate(factory)(model)
    report = frozen_opt.report("policy")
    assert set(plan.names) == set(report.names) == FROZEN
    before, checksums = whole(model), report.fingerprint(model)
    for _ in range(3):
        move(model)
        train(model, optimizer, steps=1)
        report.verify(model, optimizer, fingerprint=checksums)
    with tempfile.TemporaryDirectory() as own:
        folder: list[Any] = [own]
        dist.broadcast_object_list(folder)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(Path(folder[0], "checkpoint")))
        saved = whole(model)
        train(model, optimizer, steps=1)
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=str(Path(folder[0], "checkpoint")))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        dist.barrier()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in whole(model).items())
    move(model)
    report.verify(model, optimizer, fingerprint=checksums)
    decorate(lambda model: optimizer)(model)  # again, over what has been moved
    assert frozen_opt.report("policy").names == report.names
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError, match="which role 'policy' has frozen"):
        frozen_opt.with_freezing("critic", patterns=[])(lambda model: torch.optim.SGD(model.parameters()))(
            model
        )
    assert plan.names
    return {name for name, tensor in whole(model).items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("move", [there_and_back, swap])
@pytest.mark.parametrize("build", [fsdp2, tensor_parallel])
def test_case_21_a_sharded_model_moves_while_it_is_frozen(
    build: Callable[[], Transformer], move: Callable[[nn.Module], None]
) -> None:
    everything = set(snapshot(transformer()))
    for changed in run_ranks(run, 2, build, move):
        assert changed == everything - FROZEN


def plain(move: Callable[[nn.Module], None]) -> set[str]:
    model = transformer()
    report = frozen_opt.freeze_parameters(model, PATTERNS, role="policy")
    optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(model), weight_decay=0.1)
    before = snapshot(model)
    move(model)
    train(model, optimizer)
    report.verify(model, optimizer)
    return set(before) - moved(model, before)


def test_a_plain_model_is_swapped() -> None:
    assert plain(swap) == FROZEN
