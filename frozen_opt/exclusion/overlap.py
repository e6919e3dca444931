"""Overlapping memory: an optimizer's tensor that covers bytes of a frozen one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import torch

from frozen_opt.backends.tensor_kinds import has_memory, inner_tensors


def sharing_memory(frozen: Mapping[str, torch.Tensor], held: Iterable[torch.Tensor]) -> list[str]:
    """Names of frozen tensors whose bytes an optimizer's tensor covers: ties by `.data`, views of a part.

    By range and not by storage, since FSDP1 and ZeRO lay neighbours out in one.
    """
    ranges = sorted((*span, name) for name, tensor in frozen.items() for span in _spans(tensor))
    starts = [start for start, _, _ in ranges]
    shared = set()
    for tensor in held:
        for span in _spans(tensor):
            # Frozen ranges may overlap each other only where they are the same memory.
            place = bisect_right(starts, span[1] - 1)
            while place and ranges[place - 1][1] > span[0]:
                place -= 1
                shared.add(ranges[place][2])
    return [name for name in frozen if name in shared]


def _spans(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """From the first byte to behind the last one, of each plain tensor in which this rank holds something."""
    return [span for part in inner_tensors(tensor) if (span := _span(part))]


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    if tensor.numel() == 0 or not has_memory(tensor):
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
