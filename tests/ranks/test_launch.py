"""The launcher itself: a rank that fails or hangs fails the test, in time."""

import time

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
