"""Fixtures for all tests."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from loguru import logger

# DeepSpeed builds its extensions where this says. In the user's cache, the lock of a run that was killed
# would let every later one wait for ever.
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers share it
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="frozen-opt-extensions-")
    atexit.register(shutil.rmtree, os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The loguru records of a test, as they come."""
    records: list[Any] = []
    sink = logger.add(lambda message: records.append(message.record), level=0)
    yield records
    logger.remove(sink)
