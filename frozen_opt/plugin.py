"""The pytest plugin: the functions of `frozen_opt.testing` as fixtures, and no role that outlives its test.

Imports torch only in tests that ask for a fixture, or that have imported frozen_opt themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _forget_frozen_roles() -> Iterator[None]:
    """Forget after each test what was frozen in it."""
    yield
    if "frozen_opt.reports.remembered" in sys.modules:
        sys.modules["frozen_opt.reports.remembered"].reset()


@pytest.fixture
def assert_frozen() -> Any:
    """`frozen_opt.testing.assert_frozen(model, patterns)`."""
    return _of_testing("assert_frozen")


@pytest.fixture
def assert_excluded() -> Any:
    """`frozen_opt.testing.assert_excluded(optimizer, model, patterns)`."""
    return _of_testing("assert_excluded")


@pytest.fixture
def assert_no_state() -> Any:
    """`frozen_opt.testing.assert_no_state(optimizer, model, patterns)`."""
    return _of_testing("assert_no_state")


@pytest.fixture
def unchanged() -> Any:
    """`frozen_opt.testing.unchanged(model, patterns)`, a context manager."""
    return _of_testing("unchanged")


def _of_testing(name: str) -> Any:
    from frozen_opt import testing

    return getattr(testing, name)
