"""Fixtures for all tests."""

from collections.abc import Iterator
from typing import Any

import pytest
from loguru import logger


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The loguru records of a test, as they come."""
    records: list[Any] = []
    sink = logger.add(lambda message: records.append(message.record), level=0)
    yield records
    logger.remove(sink)
