"""The launcher itself: a rank that fails or hangs fails the test, in time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks.launch import run_ranks


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(rank_and_size, 2) == [(0, 2), (1, 2)]


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="on purpose"):
        run_ranks(fail_on_one, 2)


def test_a_hanging_rank_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not return"):
        run_ranks(hang_on_one, 2, timeout=5)


@pytest.mark.parametrize("failure", ["ImportError('on purpose')", "ValueError('on purpose')"])
def test_a_preload_that_fails_is_an_error_with_its_cause(tmp_path: Path, failure: str) -> None:
    run_ranks(rank_and_size, 1)  # builds what would need this module
    Path(tmp_path, "megatron.py").write_text(f"raise {failure}")
    root = Path(__file__).parents[2]
    script = (
        "from tests.ranks.launch import run_ranks\n"
        "from tests.ranks.test_launch import rank_and_size\n"
        "print(run_ranks(rank_and_size, 2))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 1
    assert "what ranks import failed to" in run.stderr
    assert run.stderr.count(f"raise {failure}") == 2  # on both ranks
