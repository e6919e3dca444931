"""transformers' Trainer: one process, and DDP on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from frozen_opt import (
    ResumeMismatchError,
    UnmatchedPatternError,
    metrics,
    migrate_optimizer_state,
    named_parameters,
    report,
    with_freezing,
)
from tests.ranks import qwen
from tests.trainers import tiny
from tests.trainers.launch import run


def trainer(folder: Path, patterns: list[str], steps: int = 3, model: Any = None) -> Any:
    from transformers import Trainer, TrainingArguments

    class FrozenTrainer(Trainer):
        @with_freezing("policy", patterns=patterns)
        def create_optimizer(self, model: Any = None) -> Any:
            return super().create_optimizer(model)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, **metrics()}, start_time)

    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=3,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return FrozenTrainer(model=model or qwen.build(), args=arguments, train_dataset=tiny.rows())


def train_and_resume(folder: Path) -> dict[str, Any]:
    """Three steps, saved; two more by a new trainer; and five at a stretch."""
    from transformers import Qwen3MoeForCausalLM

    checkpoint = folder / "run" / "checkpoint-3"
    first = trainer(folder / "run", tiny.PATTERNS)
    first.train()
    trained = tiny.outcome(first.model, first.optimizer.optimizer)
    # Trainer itself does not load experts: it saves them one by one, and they are fused in the model.
    resumed = trainer(folder / "run", tiny.PATTERNS, 5, Qwen3MoeForCausalLM.from_pretrained(checkpoint))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    straight = trainer(folder / "straight", tiny.PATTERNS, 5)
    straight.train()
    resumed.save_model(str(folder / "export"))
    return {
        "trained": trained,
        "resumed": tiny.outcome(resumed.model, resumed.optimizer.optimizer),
        "log": [entry for entry in resumed.state.log_history if "loss" in entry],
        "weights": [qwen.snapshot(each.model) for each in (resumed, straight)],
    }


def check_run(found: dict[str, Any], folder: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    tiny.check(found["trained"])
    tiny.check(found["resumed"])
    assert len(found["log"]) == 5
    count = len(tiny.frozen_names())
    assert {entry["policy/frozen_parameter_count"] for entry in found["log"]} == {count}
    resumed, straight = found["weights"]
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    exported = Qwen3MoeForCausalLM.from_pretrained(folder / "export")
    torch.testing.assert_close(dict(exported.named_parameters()), resumed, rtol=0, atol=0)


def test_trains_resumes_and_exports(tmp_path: Path) -> None:
    check_run(train_and_resume(tmp_path), tmp_path)


ALIKE = [pattern.replace("layers.0", "layers.1") for pattern in tiny.PATTERNS]
"""As many parameters, of the same shapes."""


def test_case_34_a_checkpoint_of_another_list_is_refused_and_moved(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    first = trainer(tmp_path, tiny.PATTERNS)
    first.train()
    before = {name: state["exp_avg"].clone() for name, state in states(first).items()}
    with pytest.raises(ResumeMismatchError, match=r"frozen then, trainable now: model\.layers\.0"):
        trainer(tmp_path, ALIKE, 5, first.model).train(resume_from_checkpoint=str(checkpoint))
    resumed = trainer(tmp_path, ALIKE, 5, first.model)
    optimizer = resumed.create_optimizer()
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    state = migrate_optimizer_state(saved, optimizer, resumed.model)
    torch.save(state, checkpoint / "optimizer.pt")
    kept = {name: moment for name, moment in before.items() if name not in report("policy").names}
    optimizer.load_state_dict(state)
    assert {name: state["exp_avg"].tolist() for name, state in states(resumed).items()} == {
        name: moment.tolist() for name, moment in kept.items()
    }
    trainer(tmp_path, ALIKE, 5, first.model).train(resume_from_checkpoint=str(checkpoint))


def states(trainer: Any) -> dict[str, Any]:
    state = getattr(trainer.optimizer, "optimizer", trainer.optimizer).state
    return {
        name: state[parameter] for name, parameter in named_parameters(trainer.model) if parameter in state
    }


def test_on_two_ranks(tmp_path: Path) -> None:
    for found in run(train_and_resume, 2, tmp_path):
        check_run(found, tmp_path)


def test_a_typo_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(UnmatchedPatternError, match=r"mlp\.gate\.weight"):
        trainer(tmp_path, tiny.TYPO).train()
