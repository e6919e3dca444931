"""TRL's SFT and GRPO trainers, in one process and on two DDP ranks."""

from pathlib import Path
from typing import Any

import pytest

import frozen_opt
from tests.ranks import qwen
from tests.trainers import tiny
from tests.trainers.launch import run

COMMON = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "save_steps": 3,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def trainer(kind: str, folder: Path, patterns: list[str], steps: int = 3, model: Any = None) -> Any:
    import trl

    # As in a script that starts an unchanged trainer. A rank and a test's process serve one list each.
    frozen_opt.decorate("transformers.trainer:Trainer.create_optimizer", "policy", patterns=patterns)

    class Logging(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, **frozen_opt.metrics()}, start_time)

    settings = {"output_dir": str(folder), "max_steps": steps, **COMMON}
    given = {"model": model or qwen.build(), "processing_class": tiny.tokenizer()}
    if kind == "SFT":
        arguments = trl.SFTConfig(max_length=16, **settings)
        return Logging(args=arguments, train_dataset=dataset("text"), **given)
    arguments = trl.GRPOConfig(num_generations=2, max_completion_length=8, beta=0.0, **settings)
    return Logging(args=arguments, train_dataset=dataset("prompt"), reward_funcs=reward, **given)


def dataset(column: str) -> Any:
    from datasets import Dataset

    words = [" ".join(f"w{token}" for token in row["input_ids"]) for row in tiny.rows()]
    return Dataset.from_list([{column: text} for text in words])


def reward(completions: list[str], **_: Any) -> list[float]:
    """Differs within each group, so that every group has an advantage."""
    return [float(len(set(text.split()))) + number % 2 for number, text in enumerate(completions)]


def train_and_resume(kind: str, folder: Path) -> dict[str, Any]:
    from transformers import Qwen3MoeForCausalLM

    first = trainer(kind, folder, tiny.PATTERNS)
    first.train()
    trained = tiny.outcome(first.model, first.optimizer.optimizer)
    checkpoint = folder / "checkpoint-3"
    # Trainer itself does not load experts: it saves them one by one, and they are fused in the model.
    resumed = trainer(kind, folder, tiny.PATTERNS, 5, Qwen3MoeForCausalLM.from_pretrained(checkpoint))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.save_model(str(folder / "export"))
    state = resumed.optimizer.optimizer.state
    return {
        "trained": trained,
        "resumed": tiny.outcome(resumed.model, resumed.optimizer.optimizer),
        "steps": {int(each["step"]) for each in state.values()},
        "log": [entry for entry in resumed.state.log_history if "loss" in entry],
        "weights": qwen.snapshot(resumed.model),
    }


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_resumes_and_exports(kind: str, world_size: int, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3MoeForCausalLM

    for found in run(train_and_resume, world_size, kind, tmp_path):
        tiny.check(found["trained"])
        tiny.check(found["resumed"])
        assert found["steps"] == {5}
        assert len(found["log"]) == 5
        count = len(tiny.frozen_names())
        assert {entry["policy/frozen_parameter_count"] for entry in found["log"]} == {count}
        exported = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "export")
        torch.testing.assert_close(dict(exported.named_parameters()), found["weights"], rtol=0, atol=0)


def refusal(kind: str, folder: Path) -> str:
    try:
        trainer(kind, folder, tiny.TYPO).train()
    except Exception as error:
        return repr(error)
    return ""


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_a_typo_stops_the_run(kind: str, tmp_path: Path) -> None:
    (text,) = run(refusal, 1, kind, tmp_path)
    assert text.startswith("UnmatchedPatternError")
    assert "mlp.gate.weight" in text
