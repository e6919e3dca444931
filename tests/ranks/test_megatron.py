"""Megatron-Core for real, on CPU and gloo: every layout freezes the same parameters, and trains the rest.

Single-process references are the bare model with torch's own optimizer. All layouts start from the same
weights, which depend on the canonical names alone, so a wrong name shows as a wrong loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loguru import logger

import frozen_opt
from frozen_opt import FreezeConfigError, FreezeReport, named_parameters, with_freezing
from frozen_opt.backends import megatron
from frozen_opt.backends.optimizer_search import find_optimizers
from frozen_opt.optimizers_by_name import build_megatron_optimizer
from tests.ranks.launch import run_ranks
from tests.ranks.megatron_cpu import LENGTH, Layout, batches, meshes_on_cpu, run_bare_step, run_step, wrap
from tests.versions import needs_grouped_mlp

pytestmark = pytest.mark.xdist_group("megatron")

PATTERNS = ["*.linear_proj.weight", "decoder.layers.[12].*", "!*.layers.2.*bias"]
SETTINGS = {"optimizer": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0}


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
    state: float
    """Elements of the first moments,"""
    expected: float
    """and what they should be: those of trainable parameters, by how many ranks share the work on each."""
    optimizers: list[str]
    logs: list[str]


def train(
    layout: Layout, patterns: list[str], ddp: dict[str, Any], build: Callable[..., Any] | None = None
) -> Seen:
    """Freeze in a pre-wrap hook, wrap, build the optimizer by a decorated factory, and train 3 steps."""
    logs: list[str] = []
    logger.add(lambda message: logs.append(message.record["level"].name), level="INFO")
    chunks = frozen_opt.freezing_hook("policy", patterns)(layout.chunks())
    by_hook = frozen_opt.report("policy")
    bare_names = [name for name, _ in named_parameters(chunks)]
    chunks = wrap(chunks, **ddp)
    parameters = dict(named_parameters(chunks))
    assert list(parameters) == bare_names
    factory = with_freezing("policy", patterns=patterns)(build or build_megatron_optimizer)
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
        expected=sum(p.numel() / _sharers(p, chunks[0]) for p in parameters.values() if p.requires_grad),
        optimizers=[type(part).__name__ for part in optimizer.chained_optimizers],
        logs=logs,
    )


def _sharers(parameter: torch.nn.Parameter, chunk: Any) -> int:
    if not chunk.ddp_config.use_distributed_optimizer:
        return 1
    return int((chunk.dp_group if getattr(parameter, "allreduce", True) else chunk.expt_dp_group).size())


def train_bare(layout: Layout, patterns: list[str]) -> tuple[list[float], FreezeReport, list[str]]:
    (model,) = layout.chunks()
    if layout.bf16:
        model.bfloat16()
    report = frozen_opt.freeze_parameters(model, patterns, role="policy")
    optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=1e-2, weight_decay=0.1)
    # torch's own names, not ours: what the canonical ones of every layout must equal
    names = [name for name, _ in model.named_parameters()]
    return [run_bare_step(model, optimizer, step) for step in range(3)], report, names


_references: dict[str, Any] = {}


def reference(layout: Layout, patterns: list[str]) -> tuple[list[float], FreezeReport, list[str]]:
    bare = replace(
        layout, tp=1, pp=1, vpp=None, ep=1, dp=1, bf16=layout.grouped == "legacy"
    )  # it takes no fp32
    key = repr((bare, patterns))
    if key not in _references:
        _references[key] = run_ranks(train_bare, 1, bare, patterns)[0]
    return _references[key]


def check(layout: Layout, patterns: list[str], ranks: list[Seen]) -> None:
    losses, report, names = reference(layout, patterns)
    assert all(rank.report == report for rank in ranks)
    assert {name for rank in ranks for name in rank.names} == set(names)
    for rank in ranks:
        assert rank.frozen == set(report.names) & set(rank.names)
        assert rank.moved == rank.held == rank.buffered == set(rank.names) - rank.frozen
        assert rank.losses in ([None] * 3, pytest.approx(losses, rel=2e-2 if layout.bf16 else 1e-5))
    assert any(rank.losses[0] is not None for rank in ranks)
    assert sum(rank.state for rank in ranks) == sum(rank.expected for rank in ranks)
    assert [rank.logs for rank in ranks] == [["INFO"], *[[]] * (len(ranks) - 1)]


@dataclass
class Case:
    """A layout, how it is wrapped, and the optimizers that Megatron makes of that."""

    layout: Layout
    optimizers: list[str]
    patterns: list[str] = field(default_factory=lambda: PATTERNS)

    @property
    def ddp(self) -> dict[str, Any]:
        return {"distributed_optimizer": self.optimizers[0] == "DistributedOptimizer"}

    def __str__(self) -> str:
        usual = vars(Layout())
        said = [f"{key}={value}" for key, value in vars(self.layout).items() if value != usual[key]]
        return ",".join([*said, *self.optimizers])


PLAIN, MIXED, SHARDED = "FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer"
TIED = ["embedding.word_embeddings.weight", "decoder.layers.3.*"]


@pytest.mark.parametrize(
    "case",
    [
        Case(Layout(), [PLAIN]),
        Case(Layout(bf16=True), [MIXED]),
        Case(Layout(dp=2), [SHARDED]),
        Case(Layout(pp=2), [PLAIN]),
        Case(Layout(pp=2, vpp=2), [SHARDED]),
        Case(Layout(ep=2), [PLAIN, PLAIN]),
        Case(Layout(ep=2, bf16=True), [SHARDED, SHARDED]),
        Case(Layout(ep=2, pp=2), [PLAIN, PLAIN]),
        Case(Layout(ep=2, grouped="te"), [SHARDED, SHARDED]),
        pytest.param(
            Case(Layout(ep=2, grouped="legacy", bf16=True), [MIXED, MIXED]), marks=needs_grouped_mlp
        ),
        Case(Layout(tp=2, experts=None), [SHARDED]),
        Case(Layout(tp=2, pp=2, experts=None, bf16=True), [MIXED]),
        Case(Layout(pp=2, tied=True), [PLAIN]),
        # Its two copies on two stages are one parameter. Without that, the stage with the trainable copy
        # waits for ever for the other's gradient. To see it, take the renaming away:
        #   sed -i '/, _tied_output)$/s/_tied_output/lambda _: {}/' frozen_opt/backends/megatron.py
        #   pytest -n 0 tests/ranks/test_megatron.py -k tied
        Case(Layout(pp=2, tied=True), [PLAIN], TIED),
        Case(Layout(pp=2, vpp=2, tied=True), [SHARDED], TIED),
        Case(Layout(pp=2, experts=None, more={"mtp_num_layers": 1}), [PLAIN], ["mtp.*", "embedding.*"]),
    ],
    ids=str,
)
def test_every_layout_freezes_and_trains_alike(case: Case) -> None:
    ranks = run_ranks(train, case.layout.ranks, case.layout, case.patterns, case.ddp)
    check(case.layout, case.patterns, ranks)
    assert all(rank.optimizers == case.optimizers for rank in ranks)


@pytest.mark.parametrize("optimizer", [PLAIN, MIXED, SHARDED])
@pytest.mark.parametrize(
    "patterns",
    [
        ["embedding.*", "decoder.layers.[01].*"],
        ["decoder.layers.[23].*", "decoder.final_layernorm.*", "output_layer.weight"],
    ],
    ids=["first", "last"],
)
def test_case_7_a_pipeline_stage_may_have_nothing_to_train(patterns: list[str], optimizer: str) -> None:
    case = Case(Layout(pp=2, bf16=optimizer == MIXED), [optimizer], patterns)
    ranks = run_ranks(train, 2, case.layout, patterns, case.ddp)
    check(case.layout, patterns, ranks)
    assert sorted(bool(rank.moved) for rank in ranks) == [False, True]
    assert all(rank.optimizers == [optimizer] for rank in ranks)


def refuse_late(layout: Layout, pattern: str, by_hand: bool, ddp: dict[str, Any]) -> tuple[str, bool]:
    chunks = wrap(layout.chunks(), **ddp)
    if by_hand:
        for name, parameter in named_parameters(chunks):
            parameter.requires_grad_(not fnmatchcase(name, pattern))
    before = [(name, parameter.requires_grad) for name, parameter in named_parameters(chunks)]
    with pytest.raises(frozen_opt.UnsupportedBackendError) as refusal:
        with_freezing("policy", patterns=[pattern])(build_megatron_optimizer)(
            chunks, {"optimizer_config": SETTINGS}
        )
    after = [(name, parameter.requires_grad) for name, parameter in named_parameters(chunks)]
    return str(refusal.value), before == after


# What it prevents: take the refusal away, and the plain optimizer passes, with memory kept for gradients that
# never come ("DID NOT RAISE"); the distributed one dies with a KeyError that prints a whole tensor:
#   sed -i 's/if names := .*/if False:/' frozen_opt/backends/megatron.py
#   pytest -n 0 tests/ranks/test_megatron.py -k case_11
@pytest.mark.parametrize("ddp", [{}, {"distributed_optimizer": True}], ids=["plain", "sharded"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["", "by hand"])
@pytest.mark.parametrize(
    ("layout", "pattern"),
    [
        (Layout(pp=2), "*.router.weight"),
        (Layout(pp=2), "output_layer.weight"),  # on the last stage alone
        (Layout(ep=2), "*.1.mlp.experts.local_experts.3.linear_fc1.weight"),  # on the second rank alone
    ],
    ids=["routers", "output layer", "expert"],
)
def test_case_11_a_freeze_after_ddp_is_refused_on_every_rank(
    layout: Layout, pattern: str, by_hand: bool, ddp: dict[str, Any]
) -> None:
    texts, untouched = zip(*run_ranks(refuse_late, 2, layout, pattern, by_hand, ddp, timeout=30), strict=True)
    assert all("register_pre_wrap_hook(frozen_opt.freezing_hook(" in text for text in texts)
    assert all(f"{pattern.removeprefix('*')} has a place in its gradient buffers" in text for text in texts)
    assert all(untouched)


def refuse_bare(layout: Layout, ddp: dict[str, Any]) -> str:
    chunks = layout.chunks()
    wrapped = wrap(chunks, **ddp)
    with pytest.raises(frozen_opt.UnsupportedBackendError) as refusal:
        frozen_opt.freeze_parameters(chunks, ["*.router.weight"], role="policy")
    assert all(parameter.requires_grad for _, parameter in named_parameters(wrapped))
    return str(refusal.value)


@pytest.mark.parametrize("ddp", [{}, {"distributed_optimizer": True}], ids=["plain", "sharded"])
def test_case_11_chunks_that_come_without_their_wrapper_are_refused_as_well(ddp: dict[str, Any]) -> None:
    (text,) = run_ranks(refuse_bare, 1, Layout(), ddp, timeout=30)
    assert "has a place in its gradient buffers" in text


def train_on_torch_fsdp(late: bool) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel

    meshes_on_cpu()
    layout = Layout(dp=2, experts=None, more={"transformer_impl": "local"})
    chunks, (bare,) = layout.chunks(), layout.chunks()
    patterns = ["*.linear_proj.weight", "decoder.layers.2.*"]
    names = frozen_opt.freeze_parameters(bare, patterns, role="bare").names
    twin = torch.optim.AdamW(frozen_opt.trainable_parameters(bare), lr=1e-2, weight_decay=0.1)
    if not late:
        frozen_opt.freezing_hook("policy", patterns)(chunks)
    chunks = [TorchFullyShardedDataParallel(chunks[0].config, DistributedDataParallelConfig(), chunks[0])]
    factory = with_freezing("policy", patterns=patterns)(build_megatron_optimizer)
    optimizer = factory(chunks, {"optimizer_config": SETTINGS | {"max_grad_norm": 0.0}})
    assert frozen_opt.report("policy").names == names
    assert frozen_opt.report("policy").element_count == frozen_opt.report("bare").element_count
    before = {name: value.full_tensor().clone() for name, value in named_parameters(chunks)}
    for step in range(3):
        tokens = batches(step)[0]
        losses = []
        for model, one in ((chunks[0], optimizer), (bare, twin)):
            loss = model(tokens, torch.arange(LENGTH)[None], None, labels=tokens.roll(1, -1)).mean()
            loss.backward()
            one.step()
            one.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    same = [
        name for name, value in named_parameters(chunks) if torch.equal(value.full_tensor(), before[name])
    ]
    assert same == list(names)
    assert {id(value) for _, value in optimizer.state} == set(
        map(id, frozen_opt.trainable_parameters(chunks))
    )


@pytest.mark.parametrize("late", [False, True])
def test_torch_fsdp_under_megatron_takes_a_freeze_before_and_after(late: bool) -> None:
    run_ranks(train_on_torch_fsdp, 2, late)


def freeze_on_a_stage(layout: Layout, pattern: str) -> tuple[set[str], FreezeReport]:
    chunks = layout.chunks()
    report = frozen_opt.freeze_parameters(chunks, [pattern], role="policy")
    frozen = {
        f"{index}:{name}"
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    }
    return frozen, report


@pytest.mark.parametrize(("layout", "rank", "chunk"), [(Layout(pp=2), 1, 0), (Layout(pp=2, vpp=2), 0, 1)])
def test_case_12_layers_go_by_their_global_number(layout: Layout, rank: int, chunk: int) -> None:
    ranks = run_ranks(freeze_on_a_stage, 2, layout, "decoder.layers.2.*")
    frozen, report = ranks[rank]
    assert len(frozen) == report.parameter_count == 15
    assert all(name.startswith(f"{chunk}:decoder.layers.0.") for name in frozen)
    assert ranks[1 - rank] == (set(), report)
    assert report == reference(Layout(), ["decoder.layers.2.*"])[1]


def freeze_routers(update_rate: float) -> tuple[list[str], list[bool], list[bool]]:
    warnings: list[str] = []
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    more = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": update_rate,
    }
    chunks = Layout(pp=2, more=more).chunks()
    routers = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "expert_bias")]
    patterns = ["*.router.weight"]
    frozen_opt.freezing_hook("policy", patterns)(chunks)
    chunks = wrap(chunks)
    factory = with_freezing("policy", patterns=patterns)(build_megatron_optimizer)
    optimizer = factory(chunks, {"optimizer_config": SETTINGS})
    before = [router.weight.clone() for router in routers]
    run_step(chunks, optimizer, 0)
    same = [torch.equal(router.weight, weight) for router, weight in zip(routers, before, strict=True)]
    return warnings, same, [bool(router.expert_bias.any()) for router in routers]


@pytest.mark.parametrize("update_rate", [1e-3, 0.0])
def test_case_18_the_log_says_once_that_expert_bias_still_moves(update_rate: float) -> None:
    first, second = run_ranks(freeze_routers, 2, update_rate)
    (warning,), nothing = first[0], second[0]
    assert "expert_bias" in warning
    assert "moe_router_bias_update_rate=0" in warning
    assert nothing == []
    for _, same, biased in (first, second):
        assert same == [True, True]
        assert biased == [update_rate > 0] * 2  # as before the freeze: not ours to stop; the remedy does


def test_a_tied_model_with_mtp_has_a_second_embedding() -> None:
    layout = Layout(pp=2, tied=True, experts=None, more={"mtp_num_layers": 1})
    first, last = run_ranks(freeze_on_a_stage, 2, layout, "embedding.word_embeddings.weight")
    assert first[0] == last[0] == {"0:embedding.word_embeddings.weight"}
    assert first[1] == last[1] == reference(layout, ["embedding.word_embeddings.weight"])[1]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
ATTENTION = ["*.self_attention.*", "*layernorm*"]


def recompute(more: dict[str, Any], patterns: list[str], remedy: bool) -> tuple[list[str], int, int]:
    warnings: list[str] = []
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    experts = None if more == MLP else 4
    (model,) = Layout(experts=experts, more=more, gpt={"position_embedding_type": "rope"}).chunks()
    frozen_opt.freeze_parameters(model, patterns, role="policy")
    if remedy:
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    tokens = batches(0)[0]
    mask = torch.ones(1, 1, *tokens.shape, tokens.shape[1]).triu(1)[0].bool()
    model(tokens, torch.arange(tokens.shape[1])[None], mask, labels=tokens).mean().backward()
    layers = [p for p in model.decoder.layers.parameters() if p.requires_grad]
    return warnings, sum(parameter.grad is not None for parameter in layers), len(layers)


@pytest.mark.parametrize(
    ("more", "patterns", "starved"),
    [
        (FULL, ["embedding.*"], True),
        (FULL, ["embedding.*", "decoder.layers.0.*"], True),
        (FULL, ["decoder.layers.0.*"], False),
        (FULL, ["embedding.*", "decoder.layers.*"], False),  # nothing there that could starve
        (MOE, ["embedding.*"], False),
        (MOE, ["embedding.*", *ATTENTION], True),
        (MOE, ATTENTION, False),
        (MLP, ["embedding.*", *ATTENTION], True),
        (CORE, ["embedding.*", *ATTENTION], False),
        ({}, ["embedding.*", *ATTENTION], False),
    ],
)
def test_recompute_that_starves_layers_of_gradients_is_warned_of(
    more: dict[str, Any], patterns: list[str], starved: bool
) -> None:
    warnings, trained, trainable = run_ranks(recompute, 1, more, patterns, False)[0]
    assert (trained == 0 and trainable > 0) == starved
    assert [("recompute_granularity" in text) for text in warnings] == [True] * starved


def warn_of_the_last_stage() -> list[str]:
    warnings: list[str] = []
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    chunks = Layout(pp=2, experts=None, more={"mtp_num_layers": 1, **FULL}).chunks()
    frozen_opt.freeze_parameters(chunks, ["embedding.*", "decoder.layers.[01].*"], role="policy")
    return warnings


def test_a_later_stage_never_starves() -> None:
    """With MTP it has an embedding as well, but its input comes from the stage before, with a gradient."""
    assert run_ranks(warn_of_the_last_stage, 2) == [[], []]


def test_the_remedy_against_starving_holds() -> None:
    _, trained, trainable = run_ranks(recompute, 1, FULL, ["embedding.*"], True)[0]
    assert trained == trainable > 0


def layer_wise(chunks: Any, config: Any) -> Any:
    """Megatron's optimizer that gives each data-parallel rank whole parameters, over plain AdamW."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    settings = OptimizerConfig(optimizer="adam", clip_grad=1.0)
    inner = torch.optim.AdamW(frozen_opt.trainable_parameters(chunks), lr=1e-2, weight_decay=0.1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    optimizer = LayerWiseDistributedOptimizer([FP32Optimizer(inner, settings, None)], settings, groups)
    optimizer.allgather_params = optimizer.broadcast_params  # gloo gathers equal sizes only
    return optimizer


def test_the_layer_wise_optimizer_is_seen_in_whole() -> None:
    ranks = run_ranks(train, 2, Layout(dp=2), PATTERNS, {}, layer_wise)
    whole = sum(rank.state for rank in ranks)
    assert 0 < ranks[0].state < whole == ranks[0].expected  # each rank has a part
    for rank in ranks:
        rank.state = rank.expected
    check(Layout(dp=2), PATTERNS, ranks)


def build_and_wrap(chunks: Any, ddp: dict[str, Any]) -> Any:
    """A factory that wraps as well, and makes everything trainable on the way."""
    for chunk in chunks:
        chunk.requires_grad_(True)
    return build_megatron_optimizer(wrap(chunks, **ddp), {"optimizer_config": SETTINGS})


def bypass(chunks: Any, ddp: dict[str, Any]) -> Any:
    """A factory that gives Megatron's optimizer every parameter, frozen or not."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return FP32Optimizer(torch.optim.SGD(parameters), OptimizerConfig(), None)


def catch(factory: Any, bf16: bool, ddp: dict[str, Any], hook: bool) -> tuple[str, set[bool]]:
    chunks = Layout(pp=2, bf16=bf16).chunks()
    if hook:
        frozen_opt.freezing_hook("policy", ["output_layer.weight"])(chunks)
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError) as caught:
        with_freezing("policy", patterns=["output_layer.weight"])(factory)(chunks, ddp)
    named = named_parameters(chunks)
    return str(caught.value), {value.requires_grad for name, value in named if name == "output_layer.weight"}


@pytest.mark.parametrize("hook", [False, True], ids=["", "frozen by a hook"])
@pytest.mark.parametrize(
    ("factory", "bf16", "ddp"),
    [
        (bypass, False, {}),
        (build_and_wrap, False, {}),
        (build_and_wrap, True, {}),  # it steps copies: identity would find nothing
        (build_and_wrap, True, {"distributed_optimizer": True}),
    ],
    ids=["bypass", "plain", "mixed", "sharded"],
)
def test_a_frozen_parameter_in_the_optimizer_is_caught(
    factory: Any, bf16: bool, ddp: dict[str, Any], hook: bool
) -> None:
    first, last = run_ranks(catch, 2, factory, bf16, ddp, hook)
    assert "the optimizer holds 1 frozen parameters: output_layer.weight" in last[0]
    assert first == (last[0], set())
    assert last[1] == {not hook}  # as before the call


def build_unknown() -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer

    class Unknown(MixedPrecisionOptimizer):
        """Knows copies of the parameters alone."""

        def __init__(self, chunks: Any) -> None:
            pass

        reload_model_params = state_dict = load_state_dict = sharded_state_dict = zero_grad = lambda self: (
            None
        )

    def factory(model: Any) -> Any:
        return ChainedOptimizer([Unknown(model)])

    Unknown.__abstractmethods__ = frozenset()
    ChainedOptimizer.__init__ = lambda self, parts: vars(self).update(chained_optimizers=parts)
    chunks = Layout().chunks()
    assert with_freezing("policy", patterns=[])(factory)(chunks)
    with pytest.raises(frozen_opt.UnsupportedBackendError, match="Unknown"):
        with_freezing("policy", patterns=["output_layer.weight"])(factory)(chunks)
    assert chunks[0].output_layer.weight.requires_grad


def test_an_unknown_megatron_optimizer_is_refused_unless_nothing_is_frozen() -> None:
    run_ranks(build_unknown, 1)


def plan_all() -> None:
    chunks = Layout(pp=2).chunks()
    with pytest.raises(frozen_opt.NothingTrainableError):
        frozen_opt.plan_freezing(chunks, ["*"], role="policy")


def test_all_stages_frozen_is_an_error() -> None:
    run_ranks(plan_all, 2)


def read_settings() -> Any:
    chunks = wrap(Layout().chunks())

    def build(**settings: Any) -> Any:
        return build_megatron_optimizer(chunks, {"optimizer_config": settings})

    with pytest.raises(FreezeConfigError, match="optimizer_config"):
        build_megatron_optimizer(chunks, {})
    with pytest.raises(FreezeConfigError, match=r"Lion.*get_megatron_muon_optimizer"):
        build(optimizer="Lion")
    with pytest.raises(FreezeConfigError, match="sgd_momentom"):
        build(optimizer="sgd", optimizer_kwargs={"sgd_momentom": 0.5})
    adam = build(lr=0.1, weight_decay=0.2, adam_betas=[0.3, 0.4], max_grad_norm=0.5)
    sgd = build(optimizer="SGD", lr=0.1, optimizer_kwargs={"sgd_momentum": 0.6})
    return adam.config.clip_grad, adam.param_groups[0], sgd.param_groups[0]


def test_build_optimizer_reads_the_config() -> None:
    clip, adam, sgd = run_ranks(read_settings, 1)[0]
    assert clip == 0.5
    assert (adam["lr"], adam["weight_decay"], adam["betas"]) == (0.1, 0.2, (0.3, 0.4))
    assert (sgd["lr"], sgd["momentum"]) == (0.1, 0.6)


def test_mamba_layers_go_by_their_global_number() -> None:
    """Mamba needs a GPU; its block is known by its class's name, and its layers say where they stand."""

    class MambaStack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
            for place, layer in enumerate(self.layers):
                layer.layer_number = 12 + place

    MambaStack.__module__, MambaStack.__qualname__ = "megatron.core.ssm.mamba_block", "MambaStack"
    assert [name for name, _ in named_parameters(MambaStack())] == ["layers.11.weight", "layers.12.weight"]


def test_transformer_engine_marks_are_read_with_care() -> None:
    """Its linears need a GPU; these have their names and marks."""

    class TELinear(torch.nn.Module):
        def __init__(self, mode: str | None, bias_marked: bool) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))
            self.bias = torch.nn.Parameter(torch.zeros(2))
            self.weight.tensor_model_parallel = True  # it marks all its weights
            self.bias.tensor_model_parallel = bias_marked
            self.parallel_mode = mode

    class TEColumnParallelGroupedLinear(TELinear):
        pass

    class TERowParallelGroupedLinear(TELinear):
        pass

    def split(linear: TELinear) -> list[bool]:
        return [megatron._is_split(name, value, linear) for name, value in linear.named_parameters()]

    assert split(TELinear(None, False)) == [False, False]  # each rank has the whole
    assert split(TELinear("column", True)) == [True, True]
    assert split(TELinear("row", False)) == [True, False]
    assert split(TEColumnParallelGroupedLinear(None, False)) == [True, True]  # Megatron splits experts itself
    assert split(TERowParallelGroupedLinear(None, False)) == [True, False]


def thaw(ddp: dict[str, Any], wrapped_too: bool) -> tuple[str, bool, torch.Tensor | None]:
    """Thaw afterwards what a hook froze before the wrapping; and the router, if it is thawed all the same."""
    router = "decoder.layers.0.mlp.router.weight"
    chunks = frozen_opt.freezing_hook("policy", ["*.router.weight"])(Layout(dp=2).chunks())
    wrapped = wrap(chunks, **ddp)
    settings = {"optimizer_config": SETTINGS}
    build = with_freezing("policy", patterns=["*.1.mlp.router.weight"])(build_megatron_optimizer)
    with pytest.raises(frozen_opt.UnsupportedBackendError) as refusal:
        build(wrapped, settings) if wrapped_too else frozen_opt.freeze_parameters(chunks, [], role="policy")
    parameters = dict(named_parameters(wrapped))
    untouched = not parameters[router].requires_grad
    parameters[router].requires_grad_(True)  # what the refusal prevents
    before = parameters[router].detach().clone()
    try:
        run_step(wrapped, build_megatron_optimizer(wrapped, settings), dist.get_rank())
    except Exception:
        return str(refusal.value), untouched, None  # it dies
    after = parameters[router].detach()
    return str(refusal.value), untouched, None if torch.equal(before, after) else after


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("ddp", [{}, {"distributed_optimizer": True}], ids=["plain", "sharded"])
def test_case_33_gradient_buffers_take_nothing_back(ddp: dict[str, Any], wrapped: bool) -> None:
    (text, untouched, first), (_, _, second) = run_ranks(thaw, 2, ddp, wrapped, timeout=60)
    assert "decoder.layers.0.mlp.router.weight" in text
    assert "has no place in the gradient buffers" in text
    assert untouched
    # Thawed all the same it does not train, or each rank by its own data alone.
    assert first is None or not torch.equal(first, second)


def thaw_in_time() -> set[str]:
    chunks = Layout().chunks()
    hook = frozen_opt.freezing_hook("policy", ["*.router.weight"])
    hook(chunks)
    frozen_opt.freezing_hook("policy", ["*.1.mlp.router.weight"])(chunks)
    wrapped = wrap(chunks)
    build = with_freezing("policy", patterns=["*.1.mlp.router.weight"])(build_megatron_optimizer)
    optimizer = build(wrapped, {"optimizer_config": SETTINGS})
    before = {name: parameter.clone() for name, parameter in named_parameters(wrapped)}
    run_step(wrapped, optimizer, 0)
    with pytest.raises(frozen_opt.UnsupportedBackendError, match="Megatron's optimizer keeps its moments in"):
        frozen_opt.migrate_optimizer_state(optimizer.state_dict(), optimizer, wrapped)
    return {name for name, parameter in named_parameters(wrapped) if torch.equal(parameter, before[name])}


def test_before_the_wrapping_a_list_may_change() -> None:
    assert run_ranks(thaw_in_time, 1, timeout=60) == [{"decoder.layers.1.mlp.router.weight"}]
