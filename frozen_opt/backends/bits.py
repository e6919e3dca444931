"""Elements bit for bit: to compare them, and to hash them together with where they stand."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def bits(elements: torch.Tensor) -> torch.Tensor:
    """The elements as integers in one dimension: equal only where every bit is, NaN and -0.0 included."""
    return elements.detach().flatten().view(_INTEGERS[elements.element_size()])


def mixed_bits(elements: torch.Tensor, salt: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """31-bit hashes of the elements, and of the elements together with where they stand, in pieces.

    A piece takes some 100 MB at most, however large the parameter.
    """
    start = salt << 40  # no shard has 2**40 elements
    for piece in torch.split(bits(elements), 1 << 21):
        values = _mix(piece.to(torch.int64))
        places = torch.arange(start, start + len(piece), device=piece.device)
        yield values & _MASK, _mix(values + _mix(places)) & _MASK
        start += len(piece)


_MASK = (1 << 31) - 1


def _mix(values: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64; integer arithmetic wraps around alike on every device."""
    values = values + -0x61C8864680B583EB
    values = (values ^ (values >> 30)) * -0x40A7B892E31B1A47
    values = (values ^ (values >> 27)) * -0x6B2FB644ECCEEE15
    return values ^ (values >> 31)
