"""Agreement across ranks: the same counts on each of them, or the same error.

Without torch.distributed there is one rank, and nothing is sent. With it, every rank must call these
functions in the same order:

1. `check_together` before anything is decided: one all-reduce of 3 integers.
2. `exchange` what each rank found: one all-gather of a few integers a rank, and only if the ranks found
   different things one all-reduce of the distinct findings, each written by the first rank that has it.
3. `check_together` after the factory has run: one all-reduce of 3 integers.

Texts travel only once a rank has failed, or no pattern matches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger

from frozen_opt import errors
from frozen_opt.errors import FreezeConfigError, FreezingError

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


def check_together(error: BaseException | None, role: str, patterns: Sequence[str], group: Group) -> None:
    """Raise on every rank if any of them failed, or if they were given different lists.

    Args:
        error: What went wrong on this rank; it is what this rank raises.
        role: The role, and
        patterns: its patterns, which must be the same everywhere.
        group: The ranks that agree; None for all.

    Raises:
        FreezeConfigError: Role or patterns differ.
        FreezingError: Another rank failed. If its error is one of ours, the same is raised everywhere.
    """
    try:
        if not distributed(group):
            if error is not None:
                raise error
            return
        if error is not None and not isinstance(error, FreezingError):
            # Where the others are still in a collective of the factory's, this must be read now or never.
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
            lists = gather((role, list(patterns)), group)
            other = next(rank for rank, given in enumerate(lists) if given != lists[0])
            here, there = _global_rank(group, 0), _global_rank(group, other)
            raise FreezeConfigError(
                f"ranks were given different lists to freeze: rank {here} has role {lists[0][0]!r} with "
                f"{lists[0][1]}, rank {there} has role {lists[other][0]!r} with {lists[other][1]}. Every "
                "rank must read the same config"
            )
    finally:
        error = None  # its traceback holds this frame, and so what it was raised for


def _first_error(error: BaseException | None, role: str, first: int, group: Group) -> BaseException:
    """What to raise once rank `first` has failed, and maybe others after it."""
    told: list[Any] = [None]
    if dist.get_rank(group) == first:
        told = [(type(error).__name__, str(error))]
    dist.broadcast_object_list(told, _global_rank(group, first), group, _device(group))
    if error is not None and (dist.get_rank(group) == first or not isinstance(error, FreezingError)):
        return error  # a factory's own exception is let through on the rank where it was raised
    name, text = told[0]
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, FreezingError):
        return ours(text)
    return FreezingError(
        f"role {role!r}: rank {_global_rank(group, first)} failed with {name}: {text}. Every rank has put "
        "back the requires_grad flags that it had changed"
    )


def exchange(finding: Any, trainable: bool, group: Group) -> tuple[list[Any], bool]:
    """The distinct findings of all ranks, by the first rank that has each, and whether any rank trains.

    Args:
        finding: Plain data (lists, strings, numbers) that says what this rank would freeze.
        trainable: Whether this rank keeps anything to train.
        group: The ranks that agree; None for all.
    """
    if not distributed(group):
        return [finding], trainable
    text = json.dumps(finding, separators=(",", ":")).encode()
    device = _device(group)
    row = torch.tensor([_digest(finding), len(text), trainable], device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    holders: dict[int, tuple[int, int]] = {}  # digest -> the first rank that has it, bytes
    trains = False
    for rank, (digest, length, trainable_there) in enumerate(other.tolist() for other in rows):
        holders.setdefault(digest, (rank, length))
        trains = trains or bool(trainable_there)
    if len(holders) == 1:
        return [finding], trains
    buffer = torch.zeros(sum(length for _, length in holders.values()), dtype=torch.uint8, device=device)
    start, slices = 0, []
    for rank, length in holders.values():
        slices.append(slice(start, start + length))
        if rank == dist.get_rank(group):
            buffer[slices[-1]] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        start += length
    dist.all_reduce(buffer, group=group)  # each byte has one writer, all others add zero
    received = bytes(buffer.tolist())
    return [json.loads(received[part]) for part in slices], trains


def add_up(table: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of all ranks' tables of integers, which must have the same shape."""
    if not distributed(group):
        return table
    table = table.to(_device(group))
    dist.all_reduce(table, group=group)
    return table.cpu()


def gather(value: Any, group: Group) -> list[Any]:
    """Every rank's value, for an error text."""
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


def _global_rank(group: Group, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
