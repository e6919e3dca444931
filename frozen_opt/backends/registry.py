"""Which backends there are, and which one a model belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from frozen_opt.backends.base import Backend
from frozen_opt.matching.names import Walk

_registered: list[Backend] = []
_built_in: list[Backend] = []


def register_backend(backend: Backend) -> None:
    """Teach frozen_opt one more backend. It is asked before those that are built in."""
    _registered.insert(0, backend)


def build_in(*backends: Backend) -> None:
    """The backends that come with frozen_opt, in the order in which they are asked."""
    _built_in[:] = backends


def backends() -> Iterator[Backend]:
    """All backends, the most special first; torch itself, which takes any module, comes last."""
    yield from _registered
    yield from _built_in


def choose_backend(walk: Walk) -> Backend:
    """The backend on which a model runs."""
    return next(backend for backend in backends() if backend.recognises(walk))
