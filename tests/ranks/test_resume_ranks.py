"""Resuming under another freeze list from the checkpoints of torch.distributed and of DeepSpeed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import frozen_opt
from frozen_opt import FreezeReport, migrate_optimizer_state
from tests.models import Transformer, train, transformer
from tests.ranks.launch import run_ranks

GATES, NORMS = ["*.mlp.gate.weight"], ["*.norm.weight"]


def start(patterns: list[str]) -> tuple[Transformer, torch.optim.AdamW, FreezeReport]:
    model = transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = frozen_opt.freeze_parameters(model, patterns, role="policy")
    return model, torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01), report


def shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's state, by name."""
    names = {id(parameter): name for name, parameter in frozen_opt.named_parameters(model)}
    return {
        names[id(parameter)]: {
            key: (value.to_local() if hasattr(value, "to_local") else value).clone()
            for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    kept = before.keys() & after.keys()
    return {
        "kept": len(kept),
        "identical": all(
            torch.equal(before[name][key], after[name][key]) for name in kept for key in after[name]
        ),
        "dropped": sorted(before.keys() - after.keys()),
    }


def steps_taken(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {name: int(state["step"]) for name, state in shards(model, optimizer).items()}


def through_dcp(folder: str, then: list[str], now: list[str]) -> dict[str, Any]:
    model, optimizer, report = start(then)
    train(model, optimizer)
    before = shards(model, optimizer)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "freeze": report.state_dict(),
    }
    dcp.save(state, checkpoint_id=folder)

    model, optimizer, report = start(now)
    weights, freeze = {"model": model.state_dict()}, {"freeze": report.state_dict()}
    dcp.load(weights, checkpoint_id=folder)
    dcp.load(freeze, checkpoint_id=folder)
    said = refusal(report, freeze["freeze"])
    target = get_optimizer_state_dict(model, optimizer)
    for name in freeze["freeze"]["names"]:  # the checkpoint has nothing for these
        target["state"].pop(name, None)
    dcp.load({"optimizer": target}, checkpoint_id=folder)
    optimizer.load_state_dict(migrate_optimizer_state(target, optimizer, model))
    result = compared(before, shards(model, optimizer)) | {"said": said}
    train(model, optimizer, steps=1)
    report.verify(model, optimizer)
    return result | {"steps": steps_taken(model, optimizer)}


NORM_NAMES = [f"layers.{i}.norm.weight" for i in range(2)]
MORE_AND_LESS = pytest.mark.parametrize(
    ("then", "now"), [(GATES, [*GATES, *NORMS]), ([*GATES, *NORMS], GATES)], ids=["more", "less"]
)


def check(result: dict[str, Any], *, frozen_now: bool) -> None:
    """That the norms, and they alone, changed sides."""
    assert result["identical"]
    assert result["kept"] == 8
    assert result["dropped"] == (NORM_NAMES if frozen_now else [])
    word = "trainable then, frozen now" if frozen_now else "frozen then, trainable now"
    assert f"{word}: layers.0.norm.weight, layers.1.norm.weight" in result["said"]
    fresh = {} if frozen_now else dict.fromkeys(NORM_NAMES, 1)
    assert {name: step for name, step in result["steps"].items() if step != 4} == fresh
    assert len(result["steps"]) == 8 + len(fresh)


@MORE_AND_LESS
def test_distributed_checkpoint(then: list[str], now: list[str], tmp_path: Path) -> None:
    for result in run_ranks(through_dcp, 2, str(tmp_path), then, now):
        check(result, frozen_now=NORMS[0] in now)


def deepspeed_engine(patterns: list[str], stage: int) -> tuple[Any, FreezeReport]:
    import deepspeed

    model = transformer()
    report = frozen_opt.freeze_parameters(model, patterns, role="policy")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": stage > 0},
    }
    optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine, report


def take_steps(engine: Any, steps: int) -> None:
    for i in range(steps):
        engine.backward(engine(torch.full((1, 3), i)).float().square().mean())
        engine.step()


def resume_deepspeed(folder: str, then: list[str], now: list[str]) -> dict[str, Any]:
    engine, report = deepspeed_engine(then, stage=0)
    take_steps(engine, 3)
    before = shards(engine, engine.optimizer)
    freeze = report.state_dict(engine, engine.optimizer)
    engine.save_checkpoint(folder, tag="last", client_state={"freeze": freeze})

    engine, report = deepspeed_engine(now, stage=0)
    _, client_state = engine.load_checkpoint(folder, tag="last", load_optimizer_states=False)
    said = refusal(report, client_state["freeze"])
    file = torch.load(Path(folder, "last", "mp_rank_00_model_states.pt"), weights_only=False)
    engine.optimizer.load_state_dict(
        migrate_optimizer_state(file["optimizer"], engine.optimizer, engine, saved=client_state["freeze"])
    )
    result = compared(before, shards(engine, engine.optimizer)) | {"said": said}
    take_steps(engine, 1)
    report.verify(engine, engine)
    return result | {"steps": steps_taken(engine, engine.optimizer)}


def refusal(report: FreezeReport, saved: dict[str, Any]) -> str:
    try:
        report.check_resume(saved)
    except frozen_opt.ResumeMismatchError as error:
        return str(error)
    return "the same"


@MORE_AND_LESS
def test_the_checkpoint_of_deepspeed(then: list[str], now: list[str], tmp_path: Path) -> None:
    for result in run_ranks(resume_deepspeed, 2, str(tmp_path), then, now):
        check(result, frozen_now=NORMS[0] in now)


def resume_zero(folder: str) -> dict[str, Any]:
    engine, report = deepspeed_engine(GATES, stage=2)
    take_steps(engine, 3)
    engine.save_checkpoint(folder, tag="last", client_state={"freeze": report.state_dict()})
    before = [state["exp_avg"].clone() for state in engine.optimizer.optimizer.state.values()]
    fingerprint = report.fingerprint(engine)

    engine, report = deepspeed_engine(GATES, stage=2)
    _, client_state = engine.load_checkpoint(folder, tag="last", load_optimizer_states=False)
    report.check_resume(client_state["freeze"])
    engine.load_checkpoint(folder, tag="last")
    report.verify(engine, engine, fingerprint=fingerprint)
    after = [state["exp_avg"] for state in engine.optimizer.optimizer.state.values()]
    identical = len(before) > 0 and all(map(torch.equal, before, after))

    # Another list: DeepSpeed's own loading would end in a KeyError, so look into its file first.
    _, report = deepspeed_engine(NORMS, stage=2)
    saved = torch.load(Path(folder, "last", "mp_rank_00_model_states.pt"), weights_only=False)
    return {"identical": identical, "said": refusal(report, saved["freeze"])}


def test_zero_resumes_under_the_same_freeze_and_is_warned_under_another(tmp_path: Path) -> None:
    for result in run_ranks(resume_zero, 2, str(tmp_path)):
        assert result["identical"]
        assert "frozen then, trainable now: layers.0.mlp.gate.weight" in result["said"]
        assert "trainable then, frozen now: layers.0.norm.weight" in result["said"]
