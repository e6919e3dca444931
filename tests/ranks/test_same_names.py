"""One model and one list of patterns: the same names, counts and losses on every backend."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import frozen_opt
from tests.ranks import qwen
from tests.ranks.launch import run_ranks

pytestmark = pytest.mark.xdist_group("same names")  # one worker, so that each fixture runs once

WRAPPED = (False, True)
"""Bare, and under the wrapper that MarinSkyRL puts around the backend's model."""


def layers(model: nn.Module) -> Any:
    return model.model.layers


def ddp(model: nn.Module) -> nn.Module:
    frozen_opt.freeze_parameters(model, qwen.PATTERNS, role="policy")  # DDP wants it before it wraps
    return DistributedDataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    torch.compiler.reset()
    layers(model)[0].self_attn = torch.compile(layers(model)[0].self_attn, backend="eager")
    return torch.compile(model, backend="eager")


def checkpointed(model: nn.Module) -> nn.Module:
    kind = type(layers(model)[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({type(layers(model)[0])})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)


def fsdp2(model: nn.Module, mesh: Any = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def all_at_once(model: nn.Module) -> nn.Module:
    """Each block checkpointed, compiled and sharded, in torchtitan's order."""
    torch.compiler.reset()
    for name, layer in layers(model).named_children():
        layers(model).register_module(name, torch.compile(checkpoint_wrapper(layer), backend="eager"))
    return fsdp2(model)


def fsdp2_and_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Attention computes on whole heads between the two, so that no rank sees a part of a gradient.
    gather = {"output_layouts": Replicate()}
    plan = {f"self_attn.{name}_proj": ColwiseParallel(**gather) for name in "qkv"}
    plan["self_attn.o_proj"] = RowwiseParallel(input_layouts=Replicate())
    for layer in layers(model):
        parallelize_module(layer, mesh["tp"], plan)
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(**gather)})
    model = fsdp2(model, mesh["dp"])
    assert isinstance(layers(model)[0].self_attn.v_proj.weight, DTensor)
    assert layers(model)[0].self_attn.v_proj.weight.device_mesh.ndim == 2
    return model


def zero(stage: int, model: nn.Module, optimizer: Any) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 by default; the reference does not
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def run(wrap: Any, wrapped: bool, data: tuple[int, int]) -> qwen.Run:
    """Freeze, build the optimizer and train, in the order that the backend wants."""
    frozen_opt.reset()
    start = qwen.snapshot(qwen.build())
    engine = None
    if isinstance(wrap, int):
        model = qwen.HFModelWrapper(qwen.build()) if wrapped else qwen.build()
        optimizer = qwen.build_policy_optimizer(model, qwen.CONFIG)
        engine = zero(wrap, model.model if wrapped else model, optimizer)
        model = qwen.HFModelWrapper(engine) if wrapped else engine
    else:
        model = qwen.HFModelWrapper(wrap(qwen.build())) if wrapped else wrap(qwen.build())
        optimizer = qwen.build_policy_optimizer(model, qwen.CONFIG)
    result = qwen.train(model, optimizer, data=data, start=start, engine=engine)
    report = frozen_opt.report("policy")
    again = frozen_opt.plan_freezing(model, qwen.PATTERNS, role="policy")
    result.names, result.elements = report.names, report.element_count
    result.names_now, result.elements_now, result.backend = again.names, again.element_count, again.backend
    return result


def runs(wraps: dict[str, Any], data_size: int) -> dict[Any, qwen.Run]:
    per_rank = dist.get_world_size() // data_size
    data = (dist.get_rank() // per_rank, data_size)
    return {(name, wrapped): run(wrap, wrapped, data) for name, wrap in wraps.items() for wrapped in WRAPPED}


def plain(model: nn.Module) -> nn.Module:
    return model


LAUNCHES: list[tuple[int, int, dict[str, Any]]] = [
    # ranks, data-parallel size, what to wrap the model in
    (1, 1, {"plain": plain, "compiled": compiled, "checkpointed": checkpointed}),
    (2, 2, {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "all at once": all_at_once}),
    (2, 2, {f"zero{stage}": stage for stage in range(4)}),
    (4, 2, {"fsdp2 and tp": fsdp2_and_tp}),
]
BACKENDS = dict.fromkeys(["fsdp1", "fsdp2", "all at once", "fsdp2 and tp"], "fsdp")
BACKENDS |= {f"zero{stage}": "deepspeed" for stage in range(4)}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[Any, qwen.Run]]:
    """For each rank of each launch, what each backend did."""
    return [
        outcome
        for ranks, data_size, wraps in LAUNCHES
        for outcome in run_ranks(runs, ranks, wraps, data_size, timeout=150)
    ]


@pytest.fixture(scope="module")
def expected() -> qwen.Run:
    return qwen.reference()


@pytest.mark.parametrize("wrapped", WRAPPED, ids=["bare", "wrapped"])
@pytest.mark.parametrize("kind", [kind for _, _, wraps in LAUNCHES for kind in wraps])
def test_every_backend_freezes_the_same(
    kind: str, wrapped: bool, outcomes: list[dict[Any, qwen.Run]], expected: qwen.Run
) -> None:
    found = [outcome[kind, wrapped] for outcome in outcomes if (kind, wrapped) in outcome]
    assert len(found) == next(ranks for ranks, _, wraps in LAUNCHES if kind in wraps)
    for result in found:
        assert (result.names, result.elements) == (expected.names, expected.elements)
        # ... and found again by the same names and counts, in whatever the model is wrapped by now
        assert (result.names_now, result.elements_now) == (expected.names, expected.elements)
        assert result.backend == BACKENDS.get(kind, "torch")
        assert result.changed == expected.changed  # all that is trainable, and nothing frozen
        assert not set(result.with_gradient) & set(expected.names)
        assert not set(result.with_state) & set(expected.names)
        # float32 throughout. Shards and ranks add up in another order: a few units in the last place.
        assert result.losses == pytest.approx(expected.losses, rel=1e-6)


def test_the_comparison_would_notice(expected: qwen.Run) -> None:
    assert len(expected.names) == qwen.FROZEN
    assert set(expected.names).isdisjoint(expected.changed)
    assert len(set(expected.names) | set(expected.changed)) == len(list(qwen.build().named_parameters()))
    everything_moves = qwen.reference(patterns=["lm_head.weight"])
    assert everything_moves.losses != pytest.approx(expected.losses, rel=1e-3)
