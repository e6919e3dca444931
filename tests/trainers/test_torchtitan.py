"""torchtitan's trainer: two FSDP2 ranks, and two pipeline stages as a list of model parts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from frozen_opt import report
from tests.trainers import stubs
from tests.trainers.launch import run

PATTERNS = ["*.router.gate.weight", "layers.0.*", "!*norm.weight"]
FROZEN = re.compile(r"(layers\.0\..*|.*router\.gate\.weight)(?<!norm\.weight)")


def train(*args: Any) -> dict[str, Any]:
    stubs.torchtitan()
    from tests.trainers import torchtitan_run

    return torchtitan_run.train(*args) | {"names": report("policy").names}


def train_and_resume(folder: Path, pipeline: int) -> list[dict[str, Any]]:
    """Three steps; two more by a new trainer, from what the first has saved; and five at a stretch."""
    runs = (folder / "run", 3), (folder / "run", 5), (folder / "straight", 5)
    return [train(where, PATTERNS, steps, pipeline) for where, steps in runs]


def refusal(folder: Path) -> str:
    try:
        train(folder, ["*.router.gates.weight"], 1, 1)
    except Exception as error:
        return repr(error)
    return ""


@pytest.mark.parametrize("pipeline", [1, 2])
def test_trains_and_resumes(pipeline: int, tmp_path: Path, installed: Callable[[str], str]) -> None:
    ranks = run(train_and_resume, 2, tmp_path, pipeline, folders=[installed("torchtitan")])
    trained, resumed, straight = zip(*ranks, strict=True)
    for found in (*trained, *resumed):
        names = list(found["sizes"])
        frozen = [name for name in names if FROZEN.fullmatch(name)]
        others = [name for name in names if name not in frozen]
        assert frozen
        assert found["with_state"] == others
        unmoved = [n for n, value in found["weights"].items() if torch.equal(value, found["start"][n])]
        assert unmoved == frozen
    sizes = {name: size for found in trained for name, size in found["sizes"].items()}
    frozen = {name for name in sizes if FROZEN.fullmatch(name)}
    for found in (*trained, *resumed):
        assert set(found["names"]) == frozen
        assert found["metrics"]["policy/frozen_parameter_count"] == len(frozen)
        assert found["metrics"]["policy/frozen_element_count"] == sum(sizes[name] for name in frozen)
    for one, other in zip(resumed, straight, strict=True):
        assert one["steps"] == other["steps"] == {5}
        if pipeline == 1:  # with stages, torchtitan resumes to about 1e-4 only, whatever is frozen
            torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def test_a_typo_stops_the_run(tmp_path: Path, installed: Callable[[str], str]) -> None:
    for text in run(refusal, 2, tmp_path, folders=[installed("torchtitan")]):
        assert text.startswith("UnmatchedPatternError")
        assert "router.gate.weight" in text
