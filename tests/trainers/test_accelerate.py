"""accelerate: DDP and FSDP2 on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from frozen_opt import trainable_parameters, with_freezing
from tests.ranks import qwen
from tests.trainers import stubs, tiny
from tests.trainers.launch import run


def build_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable_parameters(model), lr=1e-2, weight_decay=0.1)


class Training:
    """A loop as accelerate's users write it."""

    def __init__(self, kind: str, patterns: list[str]) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState
        from torch.utils.data import DataLoader

        AcceleratorState._reset_state(reset_partial_state=True)  # else a second one takes over the first's
        plugin = None
        if kind == "FSDP2":
            stubs.accelerate_fsdp()
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = qwen.build()
        optimizer = with_freezing("policy", patterns=patterns)(build_optimizer)(model)
        rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny.rows()]
        self.model, self.optimizer, self.data = self.accelerator.prepare(
            model, optimizer, DataLoader(rows, batch_size=4)
        )

    def train(self, first: int, last: int) -> None:
        for step, batch in enumerate(self.data):
            if first <= step < last:
                self.accelerator.backward(self.model(**batch).loss)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def outcome(self) -> tiny.Outcome:
        return tiny.outcome(self.model, self.optimizer.optimizer)


def train_and_resume(kind: str, folder: Path) -> dict[str, Any]:
    straight = Training(kind, tiny.PATTERNS)
    straight.train(0, 3)
    trained = straight.outcome()
    straight.accelerator.save_state(str(folder))
    straight.train(3, 4)
    resumed = Training(kind, tiny.PATTERNS)
    resumed.accelerator.load_state(str(folder))
    resumed.train(3, 4)
    exported = resumed.accelerator.get_state_dict(resumed.model)
    return {
        "trained": trained,
        "resumed": resumed.outcome(),
        "weights": [qwen.snapshot(each.model) for each in (resumed, straight)],
        "exported": {name: value.cpu() for name, value in exported.items()},
        "kind": type(resumed.model).__name__,
    }


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_trains_resumes_and_exports(kind: str, tmp_path: Path) -> None:
    ranks = run(train_and_resume, 2, kind, tmp_path)
    for found in ranks:
        assert found["kind"] == {"DDP": "DistributedDataParallel", "FSDP2": "FSDPQwen3MoeForCausalLM"}[kind]
        tiny.check(found["trained"])
        tiny.check(found["resumed"])
        resumed, straight = found["weights"]
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    exported = ranks[0]["exported"]
    torch.testing.assert_close({name: exported[name] for name in resumed}, resumed, rtol=0, atol=0)


def refusal(kind: str) -> str:
    try:
        Training(kind, tiny.TYPO)
    except Exception as error:
        return repr(error)
    return ""


def test_a_typo_stops_the_run() -> None:
    for text in run(refusal, 2, "FSDP2"):
        assert text.startswith("UnmatchedPatternError")
        assert "mlp.gate.weight" in text
