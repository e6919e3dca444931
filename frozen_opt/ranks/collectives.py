"""Collectives: what ranks tell each other while a run goes on, for `verify`, fingerprints and assertions.

Without torch.distributed there is one rank, and nothing is sent. With it, every rank must call these
functions in the same order. Texts travel only once a rank has failed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from loguru import logger

from frozen_opt import errors
from frozen_opt.errors import FreezeConfigError, FreezingError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def distributed(group: Group) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def is_first(group: Group) -> bool:
    """Rank 0 of the group, or the only process there is."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) == 0


def rank(group: Group) -> int:
    """This process's place among the ranks; 0 where there is one process."""
    return dist.get_rank(group) if distributed(group) else 0


def place(group: Group) -> str:
    """`rank 3: ` where there are ranks, to begin a text that is true of this one only."""
    return f"rank {dist.get_rank()}: " if distributed(group) else ""


def together(work: Callable[[], T], role: str, patterns: Sequence[str], group: Group) -> T:
    """Do this rank's work, and raise on every rank if any of them failed, or if their lists differ.

    One all-reduce of 3 integers.

    Args:
        work: What to do; what it raises is what this rank raises.
        role: The role, and
        patterns: its patterns, which must be the same everywhere.
        group: The ranks that agree; None for all.

    Raises:
        FreezeConfigError: Role or patterns differ.
        FreezingError: Another rank failed. If its error is one of ours, the same is raised everywhere.
    """
    error: Exception | None = None
    done: list[T] = []
    try:
        try:
            done.append(work())
        except Exception as raised:
            error = raised
        _agree(error, role, patterns, group)
    finally:
        error = None  # its traceback holds this frame, and with it the model that the work is about
    return done[0]


def _agree(error: Exception | None, role: str, patterns: Sequence[str], group: Group) -> None:
    try:
        if not distributed(group):
            if error is not None:
                raise error
            return
        if error is not None and not isinstance(error, FreezingError):
            # Where the others are in another collective, this must be read now or never.
            logger.error("{}: rank {} failed, and tells the others: {!r}", role, dist.get_rank(), error)
        size, digest = dist.get_world_size(group), _digest([role, *patterns])
        failed = size - dist.get_rank(group) if error is not None else 0
        # One maximum tells the lowest rank that failed, and both the largest and the smallest digest.
        verdict = torch.tensor([failed, digest, -digest], device=_device(group))
        dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
        failed, largest, smallest = verdict.tolist()
        if failed:
            raise _first_error(error, role, size - failed, group)
        if largest != -smallest:
            raise FreezeConfigError(
                f"role {role!r}: the ranks hold reports of different freezes. Every rank must call, with the "
                "report of the same role and list"
            )
    finally:
        error = None  # as above


def _first_error(error: BaseException | None, role: str, first: int, group: Group) -> BaseException:
    """What to raise once rank `first` has failed, and maybe others after it."""
    told: list[Any] = [None]
    if dist.get_rank(group) == first:
        told = [(type(error).__name__, str(error))]
    source = first if group is None else dist.get_global_rank(group, first)
    dist.broadcast_object_list(told, source, group, _device(group))
    if error is not None and (dist.get_rank(group) == first or not isinstance(error, FreezingError)):
        return error  # what is not ours is let through on the rank where it was raised
    return failure_elsewhere(role, source, *told[0])


def failure_elsewhere(role: str, rank: int, name: str, text: str) -> FreezingError:
    """The error on this rank for one on another: the same if it is one of ours.

    Args:
        role: Whose call it was.
        rank: The global rank that failed.
        name: The class of its error.
        text: Its text.
    """
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, FreezingError):
        return ours(text)
    return FreezingError(
        f"role {role!r}: rank {rank} failed with {name}: {text}. Every rank has put back the requires_grad "
        "flags that it had changed"
    )


def add_up(table: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of all ranks' tables of integers, which must have the same shape."""
    if not distributed(group):
        return table
    table = table.to(_device(group))
    dist.all_reduce(table, group=group)
    return table.cpu()


def gather(value: Any, group: Group) -> list[Any]:
    """Every rank's value, whatever pickles."""
    if not distributed(group):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _digest(value: Any) -> int:
    """56 bits, so that the negative fits an int64 as well."""
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=7).digest())


def _device(group: Group) -> torch.device:
    """Where the group's tensors must live: the CPU if it takes that, else its current device."""
    kinds = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
