"""Fixtures for all tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

# DeepSpeed builds its extensions where this says. In the user's cache, the lock of a run that was killed
# would let every later one wait for ever.
EXTENSIONS = Path(__file__).parent.parent / ".pytest_cache" / "extensions"
os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
if "PYTEST_XDIST_WORKER" not in os.environ:  # before there are workers
    for lock in EXTENSIONS.rglob("lock"):
        lock.unlink()


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The loguru records of a test, as they come."""
    records: list[Any] = []
    sink = logger.add(lambda message: records.append(message.record), level=0)
    yield records
    logger.remove(sink)
