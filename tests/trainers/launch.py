"""Ranks in which a trainer finds what it expects of its own launcher, and its packages."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.ranks.launch import run_ranks


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    folders: Sequence[str] = (),
    timeout: float = 240,
) -> list[Any]:
    """`run_ranks`, for trainers.

    Args:
        function: A module-level function. Its module must not import a trainer, only the function may.
        world_size: How many ranks.
        args: The same arguments for each rank.
        folders: Where packages lie that are not installed; they go before those that are.
        timeout: Seconds until every rank must have returned.
    """
    return run_ranks(_prepared, world_size, function, list(folders), args, timeout=timeout)


def _prepared(function: Callable[..., Any], folders: list[str], args: Sequence[Any]) -> Any:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # the process group is up: they ask for it, and nobody listens
        "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"],
    }
    sys.path[:0] = folders
    return function(*args)
