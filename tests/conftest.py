"""Fixtures for all tests."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from loguru import logger


def pytest_configure(config: pytest.Config) -> None:
    """Let DeepSpeed build its extensions in pytest's cache, which tox keeps apart for each environment.

    In the user's cache, the lock of a run that was killed would let every later one wait for ever.
    """
    assert config.cache is not None
    folder = config.cache.mkdir("extensions")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    if not hasattr(config, "workerinput"):  # before there are workers
        for lock in folder.rglob("lock"):
            lock.unlink()


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The loguru records of a test, as they come."""
    records: list[Any] = []
    sink = logger.add(lambda message: records.append(message.record), level=0)
    yield records
    logger.remove(sink)
