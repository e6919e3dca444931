"""Flat masters on real ranks: of the shards that a rank holds, or cut into one part a rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import frozen_opt
from frozen_opt import trainable_parameters, with_freezing
from tests.ranks.launch import run_ranks


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(30, 30, bias=False), nn.Linear(30, 40), nn.LayerNorm(40), nn.Linear(40, 7)
    ).bfloat16()


def shard(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model[2].float()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat(parameters: list[nn.Parameter]) -> torch.Tensor:
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return torch.cat([torch.zeros(3), *(p.detach().float().flatten() for p in local)])


def said(factory: Any, model: nn.Module, patterns: list[str]) -> str:
    """What the decorated factory raises, or that verify passes as well."""
    frozen_opt.reset()
    try:
        optimizer = with_freezing("policy", patterns=patterns)(factory)(model)
    except frozen_opt.FreezingError as error:
        return f"{type(error).__name__}: {error}"
    frozen_opt.report("policy").verify(model, optimizer)
    return "passes"


def masters_of_shards(patterns: list[str], honest: bool) -> str:
    model = shard(network())

    def factory(model: nn.Module) -> torch.optim.Optimizer:
        half = [
            p for p in model.parameters() if p.dtype == torch.bfloat16 and (p.requires_grad or not honest)
        ]
        rest = [p for p in trainable_parameters(model) if p.dtype != torch.bfloat16]
        return torch.optim.AdamW([nn.Parameter(flat(half)), *rest])

    return said(factory, model, patterns)


def one_part_a_rank(patterns: list[str], honest: bool) -> str:
    model = network()
    model[2].float()

    def factory(model: nn.Module) -> torch.optim.Optimizer:
        half = [
            p for p in model.parameters() if p.dtype == torch.bfloat16 and (p.requires_grad or not honest)
        ]
        part = flat(half).chunk(dist.get_world_size())[dist.get_rank()]
        return torch.optim.AdamW([nn.Parameter(part.clone()), *model[2].parameters()])

    return said(factory, model, patterns)


@pytest.mark.parametrize("masters", [masters_of_shards, one_part_a_rank])
@pytest.mark.parametrize("patterns", [["0.weight"], ["3.weight"], ["1.*"]], ids=str)
def test_case_35_on_ranks(masters: Any, patterns: list[str]) -> None:
    texts = run_ranks(masters, 2, patterns, False)
    name = patterns[0].replace("*", "weight")
    # Where a part of the ranks has found it, the others say whose error it is.
    assert all(text.startswith("FrozenParameterInOptimizerError") for text in texts)
    assert all(f"copies of {name}" in text for text in texts)
    assert run_ranks(masters, 2, patterns, True) == ["passes"] * 2


def two_sharded_networks() -> str:
    first = network()
    second = shard(copy.deepcopy(first))
    first = shard(first)
    return said(
        lambda model: torch.optim.AdamW([*trainable_parameters(model), *second.parameters()]), first, ["0.*"]
    )


def test_case_35_a_sharded_second_network() -> None:
    assert run_ranks(two_sharded_networks, 2) == ["passes"] * 2
