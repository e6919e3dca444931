"""Megatron-Core for real, on CPU and gloo: every layout freezes the same parameters, and trains the rest.

Single-process references are the bare model with torch's own optimizer. All layouts start from the same
weights, which depend on the canonical names alone, so a wrong name shows as a wrong loss.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from loguru import logger

import frozen_opt
from frozen_opt import FreezeReport, named_parameters, with_freezing
from frozen_opt.backends import find_optimizers, megatron
from tests.ranks.launch import run_ranks
from tests.ranks.megatron_cpu import HIDDEN, LENGTH, VOCABULARY, Layout, run_bare_step, run_step, wrap

pytestmark = pytest.mark.xdist_group("megatron")

PATTERNS = ["*.linear_proj.weight", "decoder.layers.[12].*", "!*.layers.2.*bias"]
SETTINGS = {"optimizer": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.0}


@dataclass
class Seen:
    """What one rank saw."""

    report: FreezeReport
    losses: list[float | None]
    names: list[str]
    frozen: set[str]
    moved: set[str]
    held: set[str]
    """Names that the optimizer steps, by frozen_opt's account."""
    buffered: set[str]
    """Names with gradient memory."""
    state: int
    """Elements of the first moments, and of the trainable parameters that are here."""
    trainable: int
    optimizers: list[str]
    logs: list[str]


def train(layout: Layout, patterns: list[str], ddp: dict[str, Any], build: Callable[..., Any] | None) -> Seen:
    """Freeze in a pre-wrap hook, wrap, build the optimizer by a decorated factory, and train 3 steps."""
    logs: list[str] = []
    logger.add(lambda message: logs.append(message.record["level"].name), level="INFO")
    chunks = frozen_opt.freezing_hook("policy", patterns)(layout.chunks())
    by_hook = frozen_opt.report("policy")
    bare_names = [name for name, _ in named_parameters(chunks)]
    chunks = wrap(chunks, **ddp)
    parameters = dict(named_parameters(chunks))
    assert list(parameters) == bare_names
    factory = with_freezing("policy", patterns=patterns)(build or megatron.build_optimizer)
    optimizer = factory(chunks, {"optimizer_config": SETTINGS})
    assert frozen_opt.report("policy") == by_hook

    before = {name: parameter.clone() for name, parameter in parameters.items()}
    losses = [run_step(chunks, optimizer, step) for step in range(3)]
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    assert all(parameters[name].grad is None for name in frozen)
    assert not any(hasattr(parameters[name], "main_grad") for name in frozen)

    ids = {id(parameter): name for name, parameter in parameters.items()}
    stepped = {id(parameter) for _, held in find_optimizers(optimizer) for parameter in held}
    buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    return Seen(
        report=frozen_opt.report("policy"),
        losses=losses,
        names=list(parameters),
        frozen=frozen,
        moved={name for name, value in before.items() if not torch.equal(parameters[name], value)},
        held={ids[key] for key in stepped if key in ids},
        buffered={ids[id(parameter)] for buffer in buffers for parameter in buffer.params},
        state=sum(state["exp_avg"].numel() for one in inner for state in one.state.values()),
        trainable=sum(parameters[name].numel() for name in set(parameters) - frozen),
        optimizers=[type(part).__name__ for part in optimizer.chained_optimizers],
        logs=logs,
    )


def train_bare(layout: Layout, patterns: list[str]) -> tuple[list[float], FreezeReport, list[str]]:
    (model,) = layout.chunks()
    if layout.bf16:
        model.bfloat16()
    report = frozen_opt.freeze_parameters(model, patterns, role="policy")
    optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=1e-2, weight_decay=0.1)
    # torch's own names, not ours: what the canonical ones of every layout must equal
    names = [name for name, _ in model.named_parameters()]
    return [run_bare_step(model, optimizer, step) for step in range(3)], report, names


@cache
def reference(**model: Any) -> tuple[list[float], FreezeReport, list[str]]:
    patterns = model.pop("patterns", PATTERNS)
    return run_ranks(train_bare, 1, Layout(**model), list(patterns))[0]


def model_of(layout: Layout) -> dict[str, Any]:
    bf16 = layout.grouped == "legacy"  # it knows no other precision
    return {"experts": layout.experts, "grouped": layout.grouped, "tied": layout.tied, "bf16": bf16}


def check(layout: Layout, ranks: list[Seen], patterns: list[str] = PATTERNS, shards: int = 1) -> None:
    losses, report, names = reference(**model_of(layout), patterns=tuple(patterns))
    assert all(rank.report == report for rank in ranks)
    assert {name for rank in ranks for name in rank.names} == set(names)
    assert {name for rank in ranks for name in rank.frozen} == set(report.names)
    for rank in ranks:
        assert rank.moved == rank.held == rank.buffered == set(rank.names) - rank.frozen
        assert rank.frozen == set(report.names) & set(rank.names)
        assert rank.losses in ([None] * 3, pytest.approx(losses, rel=2e-2 if layout.bf16 else 1e-5))
    assert any(rank.losses[0] is not None for rank in ranks)
    assert sum(rank.state for rank in ranks) == sum(rank.trainable for rank in ranks) / shards
    assert [rank.logs for rank in ranks] == [["INFO"], *[[]] * (len(ranks) - 1)]


DISTRIBUTED = {"distributed_optimizer": True}


@pytest.mark.parametrize(
    ("layout", "ddp", "optimizers"),
    [
        (Layout(), {}, ["FP32Optimizer"]),
        (Layout(bf16=True), {}, ["Float16OptimizerWithFloat16Params"]),
        (Layout(dp=2), DISTRIBUTED, ["DistributedOptimizer"]),
        (Layout(pp=2), {}, ["FP32Optimizer"]),
        (Layout(pp=2, vpp=2), DISTRIBUTED, ["DistributedOptimizer"]),
        (Layout(ep=2), {}, ["FP32Optimizer"] * 2),
        (Layout(ep=2, bf16=True), DISTRIBUTED, ["DistributedOptimizer"] * 2),
        (Layout(ep=2, pp=2), {}, ["FP32Optimizer"] * 2),
        (Layout(ep=2, grouped="te"), DISTRIBUTED, ["DistributedOptimizer"] * 2),
        (Layout(ep=2, grouped="legacy", bf16=True), {}, ["Float16OptimizerWithFloat16Params"] * 2),
        (Layout(tp=2, experts=None), DISTRIBUTED, ["DistributedOptimizer"]),
        (Layout(tp=2, pp=2, experts=None, bf16=True), {}, ["Float16OptimizerWithFloat16Params"]),
        (Layout(pp=2, tied=True), {}, ["FP32Optimizer"]),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in vars(value).items() if v) if hasattr(value, "tp") else "",
)
def test_every_layout_freezes_and_trains_alike(
    layout: Layout, ddp: dict[str, Any], optimizers: list[str]
) -> None:
    ranks = run_ranks(train, layout.ranks, layout, PATTERNS, ddp, None, timeout=60)
    # The distributed optimizer splits the state of what it holds over the data-parallel ranks; experts of
    # another rank are no copies.
    check(layout, ranks, shards=layout.dp if ddp else 1) if not (ddp and layout.ep > 1) else None
    assert all(rank.optimizers == optimizers for rank in ranks)
