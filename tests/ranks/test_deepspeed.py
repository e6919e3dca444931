"""DeepSpeed on real ranks: ZeRO 0 to 3, `zero.Init`, client and configured optimizers, pipelines."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import frozen_opt
from frozen_opt.backends.deepspeed import DeepSpeedBackend
from frozen_opt.backends.optimizer_search import find_optimizers
from frozen_opt.optimizers_by_name import build_deepspeed_optimizer
from tests.ranks import qwen
from tests.ranks.launch import run_ranks
from tests.versions import DEEPSPEED

pytestmark = pytest.mark.xdist_group("deepspeed")  # one worker, so that the fixture runs once

POLICY = {"freeze_parameters": qwen.PATTERNS, "optimizer_config": qwen.OPTIMIZER}
BFLOAT16 = {"bf16": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}

build_optimizer = frozen_opt.with_freezing("policy")(build_deepspeed_optimizer)


def settings(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 by default; the reference does not
        **more,
    }


def adamw() -> dict[str, Any]:
    """An optimizer in DeepSpeed's config; its default kind would be compiled first, for minutes."""
    params = {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.99], "torch_adam": True}
    return {"optimizer": {"type": "AdamW", "params": params}}


# In 0.17 two of DeepSpeed's constants have the same value, and it takes the one for the other.
BF16 = "BF16_Optimizer" if DEEPSPEED >= (0, 18) else "FP16_UnfusedOptimizer"
UNSHARDED = ("AdamW", "FP16_UnfusedOptimizer")

CLIENT: dict[str, tuple[dict[str, Any], str]] = {
    # what the config says, and the class of optimizer that DeepSpeed makes of it
    "stage 0": (settings(0), "AdamW"),
    "stage 0, bf16": (settings(0, **BFLOAT16), "FP16_UnfusedOptimizer"),
    "stage 1": (settings(1), "DeepSpeedZeroOptimizer"),
    "stage 1, bf16, fp32 gradients": (
        settings(1, **BFLOAT16, data_types={"grad_accum_dtype": "fp32"}),
        BF16,
    ),
    "stage 2, bf16": (settings(2, **BFLOAT16), "DeepSpeedZeroOptimizer"),
    "stage 2, offloaded": (settings(2, OFFLOAD), "DeepSpeedZeroOptimizer"),
    "stage 3, bf16": (settings(3, **BFLOAT16), "DeepSpeedZeroOptimizer_Stage3"),
    "stage 3, offloaded": (
        settings(3, {**OFFLOAD, "offload_param": {"device": "cpu"}}),
        "DeepSpeedZeroOptimizer_Stage3",
    ),
}
CONFIGURED = {f"stage {stage}, configured": settings(stage, **adamw()) for stage in range(4)}
WRAPPING = [f"stage {stage}, inside the factory" for stage in range(4)]
UNDER_INIT = ["zero.Init", "zero.Init, inside the factory"]


def train(engine: Any, optimizer: Any, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Three steps, and what the engine's optimizer holds: names, and elements of momentum on all ranks."""
    names = {id(parameter): name for name, parameter in frozen_opt.named_parameters(engine)}
    held = {
        names[id(parameter)]
        for _, parameters in find_optimizers(engine)
        for parameter in parameters
        if id(parameter) in names
    }
    inner = _inner(optimizer)
    run = train_alone(engine, optimizer, start)
    momentum = torch.tensor(sum(state["exp_avg"].numel() for state in inner.state.values()))
    kind = type(optimizer).__name__
    if kind not in UNSHARDED:
        dist.all_reduce(momentum)
    report = frozen_opt.report("policy")
    again = frozen_opt.plan_freezing(engine, qwen.PATTERNS, role="policy")
    assert (again.backend, again.names, again.element_count) == (
        "deepspeed",
        report.names,
        report.element_count,
    )
    run.names, run.elements, run.backend = report.names, report.element_count, report.backend
    return {"run": run, "held": held, "momentum": momentum.item(), "kind": kind}


def train_alone(engine: Any, optimizer: Any, start: dict[str, torch.Tensor]) -> qwen.Run:
    dtype = next(engine.parameters()).dtype
    start = {name: value.to(dtype) for name, value in start.items()}
    data = dist.get_rank(), dist.get_world_size()
    return qwen.train(engine, _inner(optimizer), data=data, start=start, engine=engine)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def with_client(config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    model = qwen.build()
    start = qwen.snapshot(model)
    client = build_optimizer(model, POLICY)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=client, config=config)
    return train(engine, optimizer, start)


def by_hand(config: dict[str, Any]) -> list[float]:
    """The losses of the same run without frozen_opt."""
    import deepspeed

    model = qwen.build()
    start = qwen.snapshot(model)
    qwen.freeze_by_hand(model)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=build_deepspeed_optimizer(model, POLICY), config=config
    )
    return train_alone(engine, optimizer, start).losses


def with_configured(config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    @frozen_opt.with_freezing("policy", patterns=qwen.PATTERNS)
    def initialize(model: nn.Module) -> Any:
        trainable = frozen_opt.trainable_parameters(model)
        return deepspeed.initialize(model=model, model_parameters=trainable, config=config)

    model = qwen.build()
    start = qwen.snapshot(model)
    engine, optimizer, _, _ = initialize(model)
    return train(engine, optimizer, start)


def inside_the_factory(model: nn.Module, config: dict[str, Any], start: Any) -> dict[str, Any]:
    import deepspeed

    @frozen_opt.with_freezing("policy")
    def initialize(model: nn.Module, policy: Any, config: Any) -> Any:
        optimizer = build_deepspeed_optimizer(model, policy)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    engine, optimizer, _, _ = initialize(model, policy=POLICY, config={"policy": POLICY, **config})
    return train(engine, optimizer, start)


def partitioned() -> nn.Module:
    """Built under `zero.Init`: from the first moment no rank holds a whole parameter."""
    import deepspeed

    whole = qwen.build().state_dict()
    with deepspeed.zero.Init(config_dict_or_path=settings(3), remote_device="cpu"):
        model = qwen.build()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(whole[name])
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    return model


def under_init(inside: bool) -> dict[str, Any]:
    import deepspeed

    model, start = partitioned(), qwen.snapshot(qwen.build())
    if inside:
        return inside_the_factory(model, settings(3), start)
    client = build_optimizer(model, POLICY)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=client, config=settings(3))
    return train(engine, optimizer, start)


def each() -> dict[str, dict[str, Any]]:
    runs = {}

    def add(name: str, function: Any, *args: Any) -> None:
        frozen_opt.reset()
        runs[name] = function(*args)

    for name, (config, _) in CLIENT.items():
        add(name, with_client, config)
        if "bf16" in name:
            runs[name]["by hand"] = by_hand(config)
    for name, config in CONFIGURED.items():
        add(name, with_configured, config)
    for stage, name in enumerate(WRAPPING):
        model = qwen.build()
        add(name, inside_the_factory, model, settings(stage), qwen.snapshot(model))
    for inside, name in enumerate(UNDER_INIT):
        add(name, under_init, bool(inside))
    return runs


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(each, 2, timeout=150)


def decayed_alike(model: nn.Module) -> torch.optim.Optimizer:
    """What DeepSpeed makes of `adamw()`: one group, norms and all."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99))


@pytest.fixture(scope="module")
def references() -> dict[str, qwen.Run]:
    return {
        "client": qwen.reference(),
        "configured": qwen.reference(optimizer=decayed_alike),
    }


@pytest.mark.parametrize("variant", [*CLIENT, *CONFIGURED, *WRAPPING, *UNDER_INIT])
def test_case_09_counts_in_full_and_trains_as_one_process_does(
    variant: str, outcomes: list[dict[str, dict[str, Any]]], references: dict[str, qwen.Run]
) -> None:
    for found in (outcome[variant] for outcome in outcomes):
        run = found["run"]
        if variant in CLIENT:
            assert found["kind"] == CLIENT[variant][1]
        expected = references["configured" if variant in CONFIGURED else "client"]
        assert (run.names, run.elements) == (expected.names, expected.elements)
        assert run.changed == expected.changed
        assert found["held"] == set(expected.changed)
        assert not set(run.with_gradient) & set(expected.names)
        # Momentum for all that trains, and for nothing else
        assert found["momentum"] == sum(p.numel() for p in qwen.build().parameters()) - expected.elements
        if "by hand" in found:  # bfloat16 rounds otherwise on two ranks than in one process
            assert run.losses == found["by hand"]
        else:  # sums in another order cost a few units in the last place
            assert run.losses == pytest.approx(expected.losses, rel=1e-6)


def flags(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def too_late() -> None:
    import deepspeed

    for config, kind in CLIENT.values():
        frozen_opt.reset()
        model = qwen.build()
        client = build_deepspeed_optimizer(model, POLICY)
        engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=client, config=config)
        # Without the refusal the plan is made, and three steps move all "frozen" tensors that have a weight
        # decay (6 of the 8) for every one of these optimizers but torch's own of stage 0. (Let
        # DeepSpeedBackend.refusal return None, and train with `qwen.train` in place of `pytest.raises`.)
        inside = [engine] if kind in UNSHARDED else [engine, engine.module]
        for wrapped in [*inside, qwen.HFModelWrapper(engine)]:
            for freeze in (frozen_opt.freeze_parameters, in_a_factory(optimizer)):
                with pytest.raises(frozen_opt.UnsupportedBackendError) as caught:
                    freeze(wrapped, qwen.PATTERNS, role="policy")
                text = str(caught.value)
                assert "DeepSpeed's optimizer already holds model.layers.0.self_attn.v_proj.weight" in text
                assert "freeze before deepspeed.initialize" in text
                assert all(flags(model))


def in_a_factory(optimizer: Any) -> Any:
    def freeze(model: nn.Module, patterns: list[str], role: str) -> Any:
        return frozen_opt.with_freezing(role, patterns=patterns)(lambda model: optimizer)(model)

    return freeze


def test_an_engine_that_holds_a_match_is_refused() -> None:
    run_ranks(too_late, 2, timeout=30)


def take_all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99))


def naive() -> None:
    import deepspeed

    client = frozen_opt.with_freezing("policy", patterns=qwen.PATTERNS)(take_all)
    model = qwen.build()
    with pytest.raises(
        frozen_opt.FrozenParameterInOptimizerError, match=f"holds {qwen.FROZEN} frozen parameters"
    ):
        client(model)  # before DeepSpeed would get to drop them
    assert all(flags(model))

    expected = qwen.reference(optimizer=decayed_alike)
    for stage in range(4):
        for configured in (False, True):
            frozen_opt.reset()
            model = qwen.build()
            start = qwen.snapshot(model)

            @frozen_opt.with_freezing("policy", patterns=qwen.PATTERNS)
            def initialize(model: nn.Module, stage: int = stage, configured: bool = configured) -> Any:
                config = settings(stage, **(adamw() if configured else {}))
                client = None if configured else take_all(model)
                return deepspeed.initialize(model=model, optimizer=client, config=config)

            if stage == 0:  # torch's own optimizer, which holds them all
                with pytest.raises(
                    frozen_opt.FrozenParameterInOptimizerError, match=f"holds {qwen.FROZEN} frozen"
                ):
                    initialize(model)
                assert all(flags(model))
            else:  # ZeRO overwrites the client's groups, and puts into them what requires a gradient
                engine, optimizer, _, _ = initialize(model)
                found = train(engine, optimizer, start)
                assert found["held"] == set(found["run"].changed) == set(expected.changed)
                assert found["run"].losses == pytest.approx(expected.losses, rel=1e-6)


def test_case_10_a_client_optimizer_that_takes_all() -> None:
    run_ranks(naive, 2, timeout=60)


def other_optimizers() -> None:
    import deepspeed
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    class Opaque(DeepSpeedOptimizer):
        """Copies alone, and no list of what they are copies of."""

        def __init__(self, model: nn.Module) -> None:
            self.optimizer = torch.optim.AdamW([p.detach().clone() for p in model.parameters()])

    model = qwen.build()
    with pytest.raises(frozen_opt.UnsupportedBackendError, match="holds none of the model's parameters"):
        frozen_opt.with_freezing("policy", patterns=qwen.PATTERNS)(lambda model: Opaque(model))(model)
    assert all(flags(model))
    frozen_opt.with_freezing("policy", patterns=[])(lambda model: Opaque(model))(
        model
    )  # nothing to prove, nothing in the way

    # What FusedAdam is wrapped in on stage 0; it would be compiled first.
    fused = frozen_opt.with_freezing("policy", patterns=qwen.PATTERNS)(
        lambda model: FP16_Optimizer(qwen.build_plain(model, qwen.CONFIG), low_precision_dtype=torch.bfloat16)
    )(model)
    held = DeepSpeedBackend().optimizer_parameters(fused)
    assert held is not None
    assert {id(parameter) for parameter in held} == {id(p) for p in model.parameters() if p.requires_grad}

    # The same in an engine
    engine, *_ = deepspeed.initialize(
        model=qwen.build(), optimizer=take_all(qwen.build()), config=settings(0)
    )
    with pytest.raises(frozen_opt.UnsupportedBackendError, match="shows none of the model's parameters"):
        frozen_opt.freeze_parameters(engine, qwen.PATTERNS, role="policy")
    assert all(flags(engine))

    # No optimizer, only the sharding: a reference model, say. There is nothing that could move.
    engine, *_ = deepspeed.initialize(model=qwen.build(), config=settings(3))
    assert DeepSpeedBackend().optimizer_parameters(engine.optimizer) == []
    frozen_opt.freeze_parameters(engine, qwen.PATTERNS, role="reference")
    assert frozen_opt.report("reference").element_count == 8000


def test_optimizers_that_deepspeed_may_or_may_not_show() -> None:
    run_ranks(other_optimizers, 1, timeout=30)


def test_nothing_is_imported_for_those_who_use_none_of_it() -> None:
    script = (
        "import sys, torch, frozen_opt\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))\n"
        "frozen_opt.freeze_parameters(model, ['0.*'], role='policy')\n"
        "print([name for name in ('deepspeed', 'torch.distributed.fsdp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_muon_is_no_client_optimizer() -> None:
    config = {"optimizer_config": {"optimizer": "Muon", "lr": 1e-2}}
    with pytest.raises(frozen_opt.FreezeConfigError, match="ZeRO hands its optimizer flat tensors"):
        build_deepspeed_optimizer(qwen.build(), config)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)


def pipeline(stage: int) -> dict[str, Any]:
    """Two stages of three layers; the names carry the layer's number in the whole model."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    config = settings(stage, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    deepspeed.init_distributed(dist_backend="gloo")  # PipelineModule wants it, and finds what is there
    model = PipelineModule(layers(), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    with pytest.raises(frozen_opt.NothingTrainableError, match="rank 1: role 'policy'"):
        frozen_opt.freeze_parameters(model, ["[35].*"], role="policy")

    @frozen_opt.with_freezing("policy", patterns=["[25].*", "!*.bias"])
    def initialize(model: nn.Module) -> Any:
        return deepspeed.initialize(model=model, optimizer=decayed_alike(model), config=config)

    engine, *_ = initialize(model)
    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"already holds [03]\.weight"):
        frozen_opt.freeze_parameters(engine, ["0.weight", "3.weight"], role="other")
    batches = [(inputs, labels) for inputs, labels in zip(*(part.split(2) for part in data()), strict=True)]
    losses = [engine.train_batch(iter(batches)).item() for _ in range(3)]
    report = frozen_opt.report("policy")
    assert (report.names, report.element_count, report.backend) == (("2.weight", "5.weight"), 72, "deepspeed")
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, start[name])]
    return {"losses": losses, "changed": changed, "parts": list(start)}


def pipelines() -> list[dict[str, Any]]:
    found = []
    for stage in (0, 1):
        frozen_opt.reset()
        found.append(pipeline(stage))
    return found


def test_pipeline_stages_freeze_by_the_whole_models_names() -> None:
    model = nn.Sequential(*layers())
    for name in ("2.weight", "5.weight"):
        model.get_parameter(name).requires_grad_(False)
    optimizer = decayed_alike(model)
    losses = []
    for _ in range(3):
        inputs, labels = data()
        loss = nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    first, second = run_ranks(pipelines, 2, timeout=60)
    for ours, theirs in zip(first, second, strict=True):
        assert ours["parts"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert theirs["parts"] == ["3.weight", "3.bias", "5.weight", "5.bias"]
        assert ours["changed"] == ["0.weight", "0.bias", "2.bias"]
        assert theirs["changed"] == ["3.weight", "3.bias", "5.bias"]
        # float32, summed over two micro-batches
        assert ours["losses"] == theirs["losses"] == pytest.approx(losses, rel=1e-6)


def thaw(stage: int) -> tuple[str, bool, bool]:
    """Thaw what was frozen before `deepspeed.initialize`; and what steps do if it is thawed all the same."""
    import deepspeed

    model, gate = qwen.build(), "model.layers.0.mlp.gate.weight"
    build = frozen_opt.with_freezing("policy", patterns=["*.mlp.gate.weight"])
    engine, optimizer, *_ = build(
        lambda model: deepspeed.initialize(
            model=model, optimizer=qwen.build_plain(model, qwen.CONFIG), config=settings(stage)
        )
    )(model)
    with pytest.raises(frozen_opt.UnsupportedBackendError) as refusal:
        frozen_opt.freeze_parameters(engine, ["*.1.mlp.gate.weight"], role="policy")
    if stage:
        with pytest.raises(
            frozen_opt.UnsupportedBackendError, match="ZeRO's optimizer keeps its moments in flat"
        ):
            frozen_opt.migrate_optimizer_state(optimizer.state_dict(), optimizer, engine)
    parameters = dict(frozen_opt.named_parameters(engine))
    untouched = not parameters[gate].requires_grad
    parameters[gate].requires_grad_(True)  # what the refusal prevents
    before = qwen.snapshot(engine)
    try:
        loss = engine(input_ids=qwen.tokens(), labels=qwen.tokens()).loss
        engine.backward(loss)
        engine.step()
    except Exception:
        return str(refusal.value), untouched, False  # it dies
    after = qwen.snapshot(engine)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    return str(refusal.value), untouched, not torch.equal(after[gate], before[gate])


@pytest.mark.parametrize("stage", range(4))
def test_case_33_an_engine_takes_nothing_back(stage: int) -> None:
    ((text, untouched, moved),) = run_ranks(thaw, 1, stage, timeout=60)
    assert "was built without model.layers.0.mlp.gate.weight" in text
    assert "deepspeed.initialize it anew" in text
    assert (untouched, moved) == (True, False)
