"""verl's FSDP engine with FSDP2 and FSDP1, on two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers import stubs, tiny
from tests.trainers.launch import run


def train_and_resume(*args: Any) -> dict[str, Any]:
    stubs.verl()
    from tests.trainers import verl_run

    return verl_run.train_and_resume(*args)


def refusal(path: str) -> str:
    stubs.verl()
    from tests.trainers import verl_run

    try:
        verl_run.engine("fsdp2", path, tiny.TYPO)
    except Exception as error:
        return repr(error)
    return ""


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_trains_resumes_and_sends(strategy: str, tmp_path: Path, installed: Callable[[str], str]) -> None:
    arguments = strategy, tiny.save(tmp_path / "model"), tmp_path / "checkpoint"
    ranks = run(train_and_resume, 2, *arguments, folders=[installed("verl")])
    for found in ranks:
        for when in ("trained", "resumed"):
            if strategy == "fsdp":  # FSDP1 leaves a rank without an element of some parameters
                held = {name for rank in ranks for name in rank[when].with_state}
                found[when].with_state = sorted(held)
            tiny.check(found[when], role="language_model")
        assert found["metrics"]["frozen_parameter_count"] == len(tiny.frozen_names())
        resumed, straight = found["weights"]
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
        for name, value in found["sent"].items():
            if name in resumed:  # experts are sent one by one
                torch.testing.assert_close(value, resumed[name], rtol=0, atol=0)


def test_a_typo_stops_the_run(tmp_path: Path, installed: Callable[[str], str]) -> None:
    path = tiny.save(tmp_path)
    for text in run(refusal, 2, path, folders=[installed("verl")]):
        assert text.startswith("UnmatchedPatternError")
        assert "mlp.gate.weight" in text
