"""FSDP2 and FSDP1 on real ranks: frozen before, after and while the model is sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import frozen_opt
from frozen_opt.optimizers_by_name import build_optimizer as build_by_config
from frozen_opt.reports.remembered import frozen_so_far
from tests.ranks import qwen
from tests.ranks.launch import run_ranks
from tests.versions import TORCH_2_6, needs_hsdp_on_cpu, needs_muon

pytestmark = pytest.mark.xdist_group("fsdp")  # one worker, so that the fixture runs once

POLICY = {"freeze_parameters": qwen.PATTERNS, "optimizer_config": qwen.OPTIMIZER}
WHOLE_UNIT = ["model.embed_tokens.weight", "model.layers.0.*"]
MUON = {"optimizer": "Muon", "lr": 1e-2, "weight_decay": 0.1}

build_optimizer = frozen_opt.with_freezing("policy")(build_by_config)


def shard(model: Any, mesh: Any = None, **settings: Any) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def shard1(model: Any, **settings: Any) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **settings)


def train(model: Any, optimizer: Any, start: dict[str, torch.Tensor] | None = None) -> qwen.Run:
    data = (dist.get_rank(), dist.get_world_size())
    run = qwen.train(model, optimizer, data=data, start=start or qwen.snapshot(qwen.build()))
    report = frozen_opt.report("policy")
    run.names, run.elements, run.backend = report.names, report.element_count, report.backend
    return run


def frozen_after(**settings: Any) -> qwen.Run:
    model = shard(qwen.build(), **settings)
    return train(model, build_optimizer(model, POLICY))


def frozen_before() -> qwen.Run:
    model = qwen.build()
    frozen_opt.freeze_parameters(model, qwen.PATTERNS, role="policy")
    shard(model)
    return train(model, build_optimizer(model, POLICY))


def kept_gathered() -> qwen.Run:
    return frozen_after(reshard_after_forward=False)


def in_bfloat16(model: Any) -> Any:
    return shard(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )


def bfloat16() -> qwen.Run:
    model = in_bfloat16(qwen.build())
    return train(model, build_optimizer(model, POLICY))


def bfloat16_by_hand() -> qwen.Run:
    """The same run without frozen_opt."""
    model = qwen.build()
    qwen.freeze_by_hand(model)
    model = in_bfloat16(model)
    optimizer = build_by_config(model, {"optimizer_config": qwen.OPTIMIZER})
    return qwen.train(
        model,
        optimizer,
        data=(dist.get_rank(), dist.get_world_size()),
        start=qwen.snapshot(qwen.build()),
    )


def offloaded() -> qwen.Run:
    return frozen_after(offload_policy=CPUOffloadPolicy(pin_memory=False))


def hybrid() -> qwen.Run:
    return frozen_after(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def whole_unit() -> qwen.Run:
    """Nothing in the first unit to train, and no gradient reaches it either."""
    model = shard(qwen.build())
    return train(model, build_optimizer(model, POLICY | {"freeze_parameters": WHOLE_UNIT}))


def after_a_step() -> qwen.Run:
    model = shard(qwen.build())
    mine = qwen.my_tokens(dist.get_rank(), dist.get_world_size())
    model(input_ids=mine, labels=mine).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return train(model, build_optimizer(model, POLICY))


def after_evaluation() -> qwen.Run:
    """A forward without a backward leaves parameters gathered, those of the root in any case."""
    model = shard(qwen.build(), reshard_after_forward=False)
    with torch.no_grad():
        model(input_ids=qwen.tokens())
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    # Without the refusal all ranks report 8 frozen parameters, and the optimizer gets the gathered copies of
    # the root's: `lm_head.weight` never trains, and where the list names one of the root's, its shard keeps
    # requires_grad and moves. (Take `gathered` out of FSDPBackend.refusal, run with -k after_evaluation.)
    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"call reshard\(\) on each FSDPModule"):
        build_optimizer(model, POLICY)
    assert all(parameter.requires_grad == flag for parameter, flag in before)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return train(model, build_optimizer(model, POLICY))


def inside(config: dict[str, Any], sharding: Callable[[Any], Any]) -> qwen.Run:
    """The factory gets a plain model, shards it and builds the optimizer, as RL trainers do."""

    @frozen_opt.with_freezing("policy")
    def build(model: Any, config: Any) -> tuple[Any, Any]:
        sharded = sharding(model)
        return sharded, build_by_config(sharded, config)

    run = train(*build(qwen.build(), config))
    frozen = frozen_opt.report("policy").names
    assert [name for _, name, _ in frozen_so_far()] == list(frozen)
    return run


def fsdp2_inside() -> qwen.Run:
    return inside(POLICY, shard)


def fsdp1_inside() -> qwen.Run:
    return inside(POLICY, lambda model: shard1(model, use_orig_params=True))


def from_meta() -> qwen.Run:
    """Built on meta devices, sharded, and filled afterwards, as large models are."""

    def fill(model: Any) -> Any:
        shard(model)
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, qwen.build().state_dict(), options=options)
        whole = qwen.build()
        for (_, ours), (_, theirs) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
            ours.copy_(theirs)  # rotary frequencies are in no state dict
        return model

    with torch.device("meta"):
        model = qwen.build()

    @frozen_opt.with_freezing("policy")
    def build(model: Any, config: Any) -> Any:
        return build_by_config(fill(model), config)

    return train(model, build(model, POLICY))


def fsdp1_frozen_before() -> qwen.Run:
    model = qwen.build()
    frozen_opt.freeze_parameters(model, qwen.PATTERNS, role="policy")
    sharded = shard1(model, use_orig_params=True)
    return train(sharded, build_optimizer(sharded, POLICY))


def fsdp1_frozen_after() -> qwen.Run:
    sharded = shard1(qwen.build(), use_orig_params=True)
    return train(sharded, build_optimizer(sharded, POLICY))


TWO_RANKS = [
    frozen_before,
    frozen_after,
    kept_gathered,
    bfloat16,
    offloaded,
    whole_unit,
    after_a_step,
    after_evaluation,
    fsdp2_inside,
    fsdp1_inside,
    from_meta,
    fsdp1_frozen_before,
    fsdp1_frozen_after,
]


def each(variants: list[Callable[[], qwen.Run]]) -> dict[str, qwen.Run]:
    runs = {}
    for variant in variants:
        frozen_opt.reset()
        runs[variant.__name__] = variant()
    return runs


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, qwen.Run]]:
    four = [] if TORCH_2_6 else run_ranks(each, 4, [hybrid])
    return [*run_ranks(each, 2, [*TWO_RANKS, bfloat16_by_hand], timeout=120), *four]


@pytest.fixture(scope="module")
def expected() -> qwen.Run:
    return qwen.reference()


@pytest.mark.parametrize(
    "variant", [*(one.__name__ for one in TWO_RANKS), pytest.param("hybrid", marks=needs_hsdp_on_cpu)]
)
def test_trains_as_one_process_does(
    variant: str, outcomes: list[dict[str, qwen.Run]], expected: qwen.Run
) -> None:
    if variant == "whole_unit":
        expected = qwen.reference(WHOLE_UNIT)
    losses = pytest.approx(expected.losses, rel=1e-6)  # sums in another order
    if variant == "bfloat16":
        losses = outcomes[0]["bfloat16_by_hand"].losses
    found = [outcome[variant] for outcome in outcomes if variant in outcome]
    assert len(found) == (4 if variant == "hybrid" else 2)
    for run in found:
        assert (run.names, run.elements, run.backend) == (expected.names, expected.elements, "fsdp")
        assert run.changed == expected.changed
        assert not set(run.with_gradient) & set(expected.names)
        assert not set(run.with_state) & set(expected.names)
        assert run.losses == losses


def flags(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def flat_after_wrapping() -> None:
    sharded = shard1(qwen.build(), use_orig_params=False)
    before = flags(sharded)
    # Without the refusal: "TypeError: 'NoneType' object is not iterable", and with that avoided
    # "'*.mlp.gate.weight' matches no parameter; the closest names: _flat_param": there is nothing to freeze
    # by. (Make FSDPBackend.refusal return None, run with -k case_06.)
    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"use FSDP2 .* with use_orig_params"):
        build_optimizer(sharded, POLICY)
    assert flags(sharded) == before


def flat_inside_the_factory() -> None:
    """A list that freezes whole units is all that flat parameters can take; then the names are gone."""
    model = qwen.build()

    @frozen_opt.with_freezing("policy", patterns=["model.layers.0.*"])
    def build(model: Any) -> Any:
        return torch.optim.AdamW(shard1(model, use_orig_params=False).parameters())

    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"names are gone: use FSDP2"):
        build(model)


def test_case_06_flat_parameters_are_refused() -> None:
    run_ranks(flat_after_wrapping, 2, timeout=30)
    run_ranks(flat_inside_the_factory, 2, timeout=30)


def reregistering() -> None:
    model = qwen.build()
    before = flags(model)
    mesh = init_device_mesh("cpu", (2,))

    @frozen_opt.with_freezing("policy")
    def split_and_build(model: Any, config: Any) -> Any:
        gate = model.model.layers[1].mlp.gate  # what a tensor-parallel step does: a new, trainable Parameter
        gate.weight = nn.Parameter(distribute_tensor(gate.weight.detach(), mesh, [Shard(0)]))
        return build_by_config(model, config)

    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError, match=r"holds 1 .*layers\.1\.mlp\.gate\."):
        split_and_build(model, POLICY)
    assert isinstance(model.model.layers[1].mlp.gate.weight, DTensor)
    assert flags(model) == before

    @frozen_opt.with_freezing("policy")
    def shard_and_take_all(model: Any, config: Any) -> Any:
        return torch.optim.AdamW(shard(model).parameters())

    model = qwen.build()
    with pytest.raises(
        frozen_opt.FrozenParameterInOptimizerError, match=f"holds {qwen.FROZEN} frozen parameters"
    ):
        shard_and_take_all(model, POLICY)
    assert flags(model) == before


def test_case_13_sharding_inside_the_factory_undoes_the_freeze() -> None:
    run_ranks(reregistering, 2, timeout=30)


class Critic(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(32, 1)


def shared_trunk() -> None:
    """Either order, and on every rank: the role that comes second learns of the first."""
    policy = shard(qwen.build())
    critic = Critic(policy.model)
    build_optimizer(policy, POLICY)
    build_critic = frozen_opt.with_freezing("critic")(build_by_config)
    frozen = frozen_opt.report("policy").names
    # The policy's freeze leaves its flags on the shared tensors: a critic that filters by them is fine ...
    build_critic(critic, POLICY | {"freeze_parameters": ["head.bias"]})
    # ... and one that takes all is told, with or without a list of its own.
    without_bias = [parameter for parameter in critic.parameters() if parameter is not critic.head.bias]
    naive = frozen_opt.with_freezing("critic")(lambda model, config: torch.optim.AdamW(without_bias))
    for patterns in ([], ["head.bias"]):
        with pytest.raises(frozen_opt.FrozenParameterInOptimizerError) as caught:
            naive(critic, POLICY | {"freeze_parameters": patterns})
        assert f"role 'critic' holds {frozen[0]}, which role 'policy' has frozen" in str(caught.value)

    frozen_opt.reset()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    optimizer = build_critic(critic, POLICY | {"freeze_parameters": ["head.bias"]})
    assert optimizer is not None  # it must live: one that is gone moves nothing
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError, match=r"'critic' holds model\.layers\.0"):
        build_optimizer(policy, POLICY)
    assert all(flags(policy))


def test_case_20_two_roles_share_sharded_tensors() -> None:
    run_ranks(shared_trunk, 2, timeout=30)


def muon() -> tuple[set[str], set[str]]:
    start = qwen.snapshot(qwen.build())
    model = shard(qwen.build())
    assert isinstance(model, FSDPModule)
    optimizer = build_optimizer(model, POLICY | {"optimizer_config": MUON})
    assert [type(part).__name__ for part in optimizer.optimizers] == ["Muon", "AdamW"]
    assert all(
        isinstance(parameter, DTensor) for parameter in optimizer.optimizers[0].param_groups[0]["params"]
    )
    run = train(model, optimizer, start)
    assert not set(run.with_state) & set(run.names)
    return set(run.changed), set(run.names)


@needs_muon
def test_hybrid_muon_on_sharded_matrices() -> None:
    for changed, frozen in run_ranks(muon, 2):
        assert changed.isdisjoint(frozen)
        assert changed | frozen == {name for name, _ in qwen.build().named_parameters()}


def tied() -> list[Any]:
    found = []
    for sharding in (shard, lambda model: shard1(model, use_orig_params=True)):
        model = sharding(qwen.build(tie_word_embeddings=True))
        plan = frozen_opt.plan_freezing(model, ["lm_head.weight"], role="policy")
        found.append((plan.backend, plan.names, plan.ties, plan.element_count))
    split = qwen.build(tie_word_embeddings=True)  # tensor parallelism alone: DTensors, and no FSDP
    parallelize_module(split, init_device_mesh("cpu", (2,)), {"lm_head": ColwiseParallel()})
    plan = frozen_opt.plan_freezing(split, ["lm_head.weight"], role="policy")
    found.append((plan.backend, plan.names, plan.ties, plan.element_count))
    # The inside of FSDP1 holds this rank's shards, and nothing there says how large the whole is.
    inside = shard1(qwen.build(), use_orig_params=True).module
    with pytest.raises(frozen_opt.UnsupportedBackendError, match="pass the FullyShardedDataParallel itself"):
        frozen_opt.plan_freezing(inside, ["lm_head.weight"], role="policy")
    return found


def test_a_sharded_tie_counts_once_and_in_full() -> None:
    embedding = "model.embed_tokens.weight"
    tie = ("fsdp", (embedding,), {embedding: ("lm_head.weight",)}, 64 * 32)
    untied = ("torch", ("lm_head.weight",), {}, 64 * 32)  # splitting the head made it a tensor of its own
    assert run_ranks(tied, 2, timeout=30) == [[tie, tie, untied]] * 2
