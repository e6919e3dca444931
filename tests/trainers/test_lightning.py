"""Lightning: in one process, and its DDP strategy on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from frozen_opt import freeze_parameters, metrics, trainable_parameters, with_freezing
from tests.ranks import qwen
from tests.trainers import tiny
from tests.trainers.launch import run


def module(patterns: list[str]) -> Any:
    from lightning import LightningModule

    class Policy(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = qwen.build()

        def configure_model(self) -> None:  # before a strategy wraps the model
            freeze_parameters(self.model, patterns, role="policy")

        @with_freezing("policy", patterns=patterns, model="self.model")
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(trainable_parameters(self.model), lr=1e-2, weight_decay=0.1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log_dict({"loss": loss, **metrics()})
            return loss

    return Policy()


def fit(policy: Any, steps: int, resume: str | None = None) -> Any:
    from lightning import Trainer
    from torch.utils.data import DataLoader

    # An epoch has three steps: a plain DataLoader is resumed at the end of one only.
    ranks = torch.distributed.get_world_size()
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny.rows(12 * ranks)]
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=steps,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(policy, DataLoader(rows, batch_size=4), ckpt_path=resume)
    return trainer


def train_and_resume(folder: Path) -> dict[str, Any]:
    first = module(tiny.PATTERNS)
    trainer = fit(first, 3)
    trained = tiny.outcome(first.model, trainer.optimizers)
    checkpoint = str(folder / "three.ckpt")
    trainer.save_checkpoint(checkpoint)
    resumed, straight = module(tiny.PATTERNS), module(tiny.PATTERNS)
    trainer = fit(resumed, 4, checkpoint)
    fit(straight, 4)
    trainer.save_checkpoint(str(folder / "four.ckpt"))
    return {
        "trained": trained,
        "resumed": tiny.outcome(resumed.model, trainer.optimizers),
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "weights": [qwen.snapshot(each.model) for each in (resumed, straight)],
        "wrapped": type(trainer.strategy.model).__name__,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_resumes_and_exports(world_size: int, tmp_path: Path) -> None:
    for found in run(train_and_resume, world_size, tmp_path):
        tiny.check(found["trained"])
        tiny.check(found["resumed"])
        assert found["logged"]["policy/frozen_parameter_count"] == len(tiny.frozen_names())
        resumed, straight = found["weights"]
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    exported = torch.load(tmp_path / "four.ckpt", weights_only=True)["state_dict"]
    exported = {name.removeprefix("model."): value for name, value in exported.items()}
    torch.testing.assert_close({name: exported[name] for name in resumed}, resumed, rtol=0, atol=0)


def refusal() -> str:
    try:
        fit(module(tiny.TYPO), 1)
    except Exception as error:
        return repr(error)
    return ""


def test_a_typo_stops_the_run() -> None:
    for text in run(refusal, 2):
        assert text.startswith("UnmatchedPatternError")
        assert "mlp.gate.weight" in text
