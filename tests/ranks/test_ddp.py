"""DistributedDataParallel on real ranks: when it wraps decides what can be frozen."""

import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import frozen_opt
from tests.ranks import qwen
from tests.ranks.launch import run_ranks
from tests.versions import FUSED_EXPERTS


def flags(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def wrapped_inside() -> nn.Module:
    return qwen.HFModelWrapper(DistributedDataParallel(qwen.build()))


def wrapped_outside() -> nn.Module:
    return DistributedDataParallel(qwen.HFModelWrapper(qwen.build()))


def one_layer_wrapped() -> nn.Module:
    model = qwen.build()
    model.model.layers[0] = DistributedDataParallel(model.model.layers[0])
    return model


def frozen_by_hand() -> nn.Module:
    """What the reducer waits for no longer shows in the flags."""
    model = DistributedDataParallel(qwen.build())
    names = frozen_opt.plan_freezing(qwen.build(), qwen.PATTERNS, role="policy").names
    for name, parameter in frozen_opt.named_parameters(model):
        parameter.requires_grad_(name not in names)
    return model


def refused() -> None:
    for wrap in (wrapped_inside, wrapped_outside, one_layer_wrapped, frozen_by_hand):
        model = wrap()
        before = flags(model)
        # Without the refusal the second of three steps fails, for each of the four: "RuntimeError: Expected
        # to have finished reduction in the prior iteration before starting a new one". (Let
        # TorchBackend.refusal return None, and put `qwen.train(model, optimizer, data=(dist.get_rank(), 2))`
        # in place of `pytest.raises`.)
        with pytest.raises(frozen_opt.UnsupportedBackendError) as caught:
            qwen.build_policy_optimizer(model, qwen.CONFIG)
        text = str(caught.value)
        assert "DistributedDataParallel already wraps model.layers.0.self_attn.v_proj.weight" in text
        assert "freeze before wrapping" in text
        assert "find_unused_parameters=True or static_graph=True" in text
        assert flags(model) == before


def test_case_05_frozen_after_wrapping_is_refused() -> None:
    run_ranks(refused, 2, timeout=30)


def inside_alone() -> None:
    """As Lightning's DDP strategy has it: it wraps the module before it asks for the optimizer."""
    model = qwen.build()
    ddp = DistributedDataParallel(model)
    for part, lists in (
        (model, qwen.CONFIG),
        (model.model, qwen.CONFIG),
        (nn.ModuleList([model]), qwen.CONFIG),
    ):
        before = flags(model)
        # Without `_note` it is accepted, and the second of three steps fails: "Expected to have finished
        # reduction in the prior iteration before starting a new one".
        with pytest.raises(
            frozen_opt.UnsupportedBackendError, match=r"already wraps .*freeze before wrapping"
        ):
            qwen.build_policy_optimizer(part, lists)
        assert flags(model) == before
    del ddp  # by its own cycles it lives on, until the garbage collector comes
    qwen.build_policy_optimizer(model, qwen.CONFIG)
    DistributedDataParallel(model)  # over what was frozen before
    frozen_opt.reset()
    qwen.build_policy_optimizer(model, qwen.CONFIG)


def test_case_32_the_inside_of_a_ddp_is_refused_like_the_ddp() -> None:
    run_ranks(inside_alone, 2, timeout=60)


MADE_BEFORE = """
import frozen_opt  # imports nothing yet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
wrapped = DistributedDataParallel(model)
try:
    frozen_opt.freeze_parameters(model, ["0.weight"], role="policy")
except frozen_opt.UnsupportedBackendError as error:
    print(error)
"""


def test_case_32_a_ddp_that_was_made_before_anything_of_frozen_opt_was_used_is_known() -> None:
    run = subprocess.run([sys.executable, "-c", MADE_BEFORE], capture_output=True, text=True, timeout=120)
    assert "DistributedDataParallel already wraps 0.weight" in run.stdout, run.stderr


def inside_of_a_tolerant_one() -> qwen.Run:
    model = qwen.build()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = qwen.build_policy_optimizer(model, qwen.CONFIG)
    return qwen.train(ddp, optimizer, data=(dist.get_rank(), 2))


def test_case_32_the_inside_of_a_ddp_that_looks_for_unused_parameters_trains() -> None:
    expected = qwen.reference()
    for run in run_ranks(inside_of_a_tolerant_one, 2, timeout=60):
        assert run.changed == expected.changed
        assert run.losses == pytest.approx(expected.losses, rel=1e-6)


def accepted() -> dict[str, qwen.Run]:
    def unused() -> nn.Module:
        return DistributedDataParallel(qwen.build(), find_unused_parameters=True)

    def static() -> nn.Module:
        return DistributedDataParallel(qwen.build(), static_graph=True)

    def frozen_first() -> nn.Module:
        model = qwen.build()
        frozen_opt.freeze_parameters(model, qwen.PATTERNS, role="policy")
        return qwen.HFModelWrapper(DistributedDataParallel(model))

    def inside_the_factory() -> nn.Module:
        return qwen.build()

    def what_ddp_wraps_stays() -> nn.Module:
        """DDP around the layer that this list leaves alone."""
        model = qwen.build()
        model.model.layers[1] = DistributedDataParallel(model.model.layers[1])
        return model

    runs = {}
    for wrap in (unused, static, frozen_first, inside_the_factory):
        frozen_opt.reset()
        model = wrap()
        if wrap is inside_the_factory:

            @frozen_opt.with_freezing("policy")
            def build(model: Any, config: Any) -> tuple[Any, Any]:
                wrapped = DistributedDataParallel(model)
                return wrapped, qwen.build_plain(wrapped, config)

            model, optimizer = build(model, qwen.CONFIG)
        else:
            optimizer = qwen.build_policy_optimizer(model, qwen.CONFIG)
        run = qwen.train(model, optimizer, data=(dist.get_rank(), 2))
        run.names = frozen_opt.report("policy").names
        runs[wrap.__name__] = run
    plan = frozen_opt.plan_freezing(what_ddp_wraps_stays(), ["model.layers.0.mlp.*"], role="other")
    assert len(plan.names) == (3 if FUSED_EXPERTS else 13)
    return runs


def test_case_05_what_ddp_can_take_trains_as_one_process_does() -> None:
    expected = qwen.reference()
    for runs in run_ranks(accepted, 2, timeout=60):
        assert len(runs) == 4
        for run in runs.values():
            assert (run.names, run.changed) == (expected.names, expected.changed)
            assert not {*run.with_gradient, *run.with_state} & set(expected.names)
            assert run.losses == pytest.approx(expected.losses, rel=1e-6)  # float32, another order of sums
