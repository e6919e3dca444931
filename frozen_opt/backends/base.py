"""What frozen_opt asks of a training backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from frozen_opt.backends.tensor_kinds import element_counts, stored_elements
from frozen_opt.matching.names import Found, Walk


class Backend:
    """One training backend. Subclass it, override what differs, and `register_backend(MyBackend())`."""

    name: str
    """What the report and the log call it."""

    idle_ranks: bool = False
    """A rank may be left with nothing to train (a pipeline stage), and its optimizer copes."""

    def recognises(self, walk: Walk) -> bool:
        """Does the model run on this backend? `walk.classes` tells what it is made of."""
        raise NotImplementedError

    def refusal(self, walk: Walk, matched: Sequence[Found]) -> str | None:
        """Why freezing `matched` now can't be honoured, and what to do instead; None if it can be.

        Asked before anything changes. A parameter may be frozen already, by a pre-wrap hook, say.
        """
        return None

    def thaw_refusal(self, walk: Walk, thawed: Sequence[Found]) -> str | None:
        """Why `thawed`, which was frozen until now, can't train from now on, and what to do; None if it can.

        Asked before anything changes.
        """
        return None

    def warnings(self, walk: Walk, matched: Sequence[Found]) -> list[str]:
        """What will surprise a user who freezes `matched`, a sentence or two each, with the remedy."""
        return []

    def element_counts(self, walk: Walk, parameters: Sequence[nn.Parameter]) -> list[int]:
        """How many elements each parameter has in full, all its shards together."""
        return element_counts(walk, parameters)

    def resting(self, walk: Walk) -> Mapping[int, nn.Parameter]:
        """For parameters that stand in the tree only while they are in use, by id: the lasting ones."""
        return {}

    def elements(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a parameter at rest, whatever else shares their storage.

        Raises:
            UnsupportedBackendError: They can't be read.
        """
        return stored_elements(parameter)

    def optimizer_parameters(self, optimizer: Any) -> Sequence[torch.Tensor] | None:
        """The model's own parameters that `optimizer` steps; None if it is none of this backend's.

        Not the copies or flat buffers that it may hold in their place: identity proves nothing there.

        Raises:
            UnsupportedBackendError: It is one of this backend's, but of a kind that can't be seen into.
        """
        return None
