"""Where in some tensors the values of others stand: whole or in part, in any order, in another precision.

Read are 8 bytes of the searched tensors every so many elements, and of what is searched for all the places
that may have come to stand there: a small part of one pass over either. Around what meets, a run of equal
bits tells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from frozen_opt.backends.bits import bits

Key = TypeVar("Key")
Spot = tuple[int, int]
"""Which of the searched tensors, and the element of it at which the first one stands (below 0 where the
first ones are on another rank)."""

# Every how many elements the searched tensors are looked at, for parameters of how many elements.
_TIERS = ((8, range(16, 256)), (64, range(256, 1 << 62)))
_APART = 1 << 15
_BATCH = 1 << 16  # what is looked at together fits into a CPU's cache
_TRIES = 1000


def search(
    needles: Mapping[str, torch.Tensor], hay: Sequence[torch.Tensor]
) -> tuple[dict[str, list[Spot]], list[str]]:
    """Where in `hay` each needle or a part of it is, and which needles can't be told from other values.

    Those have one value, or few elements. They are found only where a tensor of `hay` is equal to them.
    Of the others a quarter is found, or some 70 elements, if the needle's first or last ones are among them
    (a rank's part of a flat tensor, say), and any 33,000 elements.

    Args:
        needles: Floating-point tensors of one dimension, by name.
        hay: The same. Where two differ in precision, the lower one counts.
    """
    spots: dict[str, list[Spot]] = {}
    rich: set[str] = set()
    for alike in _by_kind(dict(enumerate(hay))):
        for chosen in _by_kind(needles):
            kinds = _kind(alike)[0], _kind(chosen)[0]
            dtype = min(kinds, key=lambda kind: kind.itemsize)
            for stride, sizes in _TIERS:
                sized = {name: needle for name, needle in chosen.items() if needle.numel() in sizes}
                anchors = _anchors(sized, stride, dtype, _kind(alike)[1])
                rich.update(anchors.names[owner] for owner in anchors.owners.bincount().nonzero())
                for name, place, meeting in _meetings(anchors, alike, stride, dtype):
                    if _stands(needles[name], hay[place[0]], place[1], meeting, dtype):
                        spots.setdefault(name, []).append(place)
    poor = [name for name in needles if name not in rich]
    for name in poor:
        if equal := [(which, 0) for which, tensor in enumerate(hay) if _is_copy(needles[name], tensor)]:
            spots[name] = equal
    return {name: spots[name] for name in needles if name in spots}, poor


def surplus(
    needles: Mapping[str, torch.Tensor], hay: Sequence[torch.Tensor], known: Sequence[torch.Tensor]
) -> list[str]:
    """Names of the needles for which `hay` has room: more elements of one of their values than `known` has.

    Args:
        needles: As for `search`.
        hay: What may hold them.
        known: What `hay` holds for certain.
    """
    roomy = set()
    for chosen in _by_kind(needles):
        dtype = _kind(chosen)[0]
        wide = {name: _wide(needle) for name, needle in chosen.items()}
        marks = {name: needle[needle.abs().argmax()].cpu() for name, needle in wide.items()}
        values = torch.unique(torch.stack(list(marks.values())))
        more = _count(hay, dtype, values) - _count(known, dtype, values)
        for name, mark in marks.items():
            own = int((wide[name] == mark).sum())  # 0 where the mark is NaN
            if own and own <= int(more[values == mark]):
                roomy.add(name)
    return [name for name in needles if name in roomy]


class _Anchors(NamedTuple):
    """Places in the needles, by the 8 bytes that stand there."""

    names: list[str]
    keys: torch.Tensor
    """Sorted."""
    owners: torch.Tensor
    """Indices into `names`."""
    offsets: torch.Tensor


def _anchors(
    needles: Mapping[str, torch.Tensor], stride: int, dtype: torch.dtype, device: torch.device
) -> _Anchors:
    """Runs of as many places as are between two looks, at the start of each needle, its end and between."""
    if not needles:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return _Anchors([], none, none, none)
    kind = _key_dtype(dtype)
    width = 8 // kind.itemsize
    length = stride + width - 1
    blocks, owners, starts = [], [], []
    for owner, needle in enumerate(needles.values()):
        last = needle.numel() - length
        at = list(range(0, last + 1, _APART))
        if last - at[-1] >= length:
            at.append(last)
        blocks += [needle.narrow(0, start, length) for start in at]
        owners += [owner] * len(at)
        starts += at
    elements = bits(torch.stack(blocks).to(device, kind)).view(-1, length).unfold(1, width, 1)
    keys = elements.contiguous().view(torch.int64).squeeze(-1)
    owner_of = torch.tensor(owners, device=device).unsqueeze(1).expand_as(keys)
    offsets = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(stride, device=device)
    telling = (elements != elements[..., :1]).any(-1)  # a run of one value is everywhere
    keys, order = keys[telling].sort(stable=True)
    owner_of, offsets = owner_of[telling][order], offsets[telling][order]
    again = (keys[1:] == keys[:-1]) & (owner_of[1:] == owner_of[:-1])
    once = torch.ones_like(keys, dtype=torch.bool)
    once[1:] &= ~again
    once[:-1] &= ~again
    return _Anchors(list(needles), keys[once], owner_of[once], offsets[once])


def _meetings(
    anchors: _Anchors, hay: Mapping[int, torch.Tensor], stride: int, dtype: torch.dtype
) -> Iterator[tuple[str, Spot, int]]:
    """Where a needle may be, and the element at which the two met; the likeliest places first."""
    kind = _key_dtype(dtype)
    size = min(26, max(16, len(anchors.keys).bit_length() + 4))
    table = torch.zeros(1 << size, dtype=torch.bool, device=anchors.keys.device)
    table[_slots(anchors.keys, size)] = True  # says no to most keys, at a fraction of a search's cost
    times: Counter[tuple[int, int, int]] = Counter()
    met: dict[tuple[int, int, int], int] = {}
    for batch in _batches(hay, stride, 8 // kind.itemsize) if len(anchors.keys) else ():
        keys = bits(torch.cat([windows for _, _, windows in batch]).to(kind)).view(torch.int64)
        rows = table[_slots(keys, size)].nonzero().squeeze(1)
        left = torch.searchsorted(anchors.keys, keys[rows])
        count = torch.searchsorted(anchors.keys, keys[rows], right=True) - left
        rows = rows.repeat_interleave(count)
        before = (count.cumsum(0) - count).repeat_interleave(count)
        entry = left.repeat_interleave(count) + torch.arange(len(rows), device=rows.device) - before
        first = 0
        for which, start, windows in batch:
            inside = (rows >= first) & (rows < first + len(windows))
            elements = start + (rows[inside] - first) * stride
            owners, places = anchors.owners[entry[inside]], elements - anchors.offsets[entry[inside]]
            for owner, place, element in torch.stack([owners, places, elements], 1).tolist():
                times[owner, which, place] += 1
                met.setdefault((owner, which, place), element)
            first += len(windows)
    tries: Counter[int] = Counter()
    for candidate, _ in times.most_common():
        owner, which, place = candidate
        tries[owner] += 1
        if tries[owner] <= _TRIES:
            yield anchors.names[owner], (which, place), met[candidate]


def _batches(
    hay: Mapping[int, torch.Tensor], stride: int, width: int
) -> Iterator[list[tuple[int, int, torch.Tensor]]]:
    """What is looked at: which tensor, from which element on, and rows of `width` elements."""
    batch: list[tuple[int, int, torch.Tensor]] = []
    rows = 0
    for which, tensor in hay.items():
        if len(tensor) < width:
            continue
        for number, windows in enumerate(torch.split(tensor.unfold(0, width, stride), _BATCH)):
            batch.append((which, number * _BATCH * stride, windows))
            rows += len(windows)
            if rows >= _BATCH:
                yield batch
                batch, rows = [], 0
    if batch:
        yield batch


def _stands(needle: torch.Tensor, tensor: torch.Tensor, start: int, meeting: int, dtype: torch.dtype) -> bool:
    """Are enough elements equal, around the one at which the two met?"""
    enough = min(64, max(16, len(needle) // 4))
    first = max(start, meeting - enough, 0)
    last = min(start + len(needle), meeting + enough, len(tensor))
    there = tensor[first:last].to(dtype)
    part = needle[first - start : last - start].to(there.device, dtype)
    different = [first - 1, *((bits(there) != bits(part)).nonzero().squeeze(1) + first).tolist(), last]
    after = bisect_right(different, meeting)
    return bool(different[after] - different[after - 1] > enough)


def _is_copy(needle: torch.Tensor, tensor: torch.Tensor) -> bool:
    if len(needle) != len(tensor) or bool((needle == needle[0]).all()):
        return False
    dtype = min(tensor.dtype, needle.dtype, key=lambda kind: kind.itemsize)
    return torch.equal(bits(tensor.to(dtype)), bits(needle.to(tensor.device, dtype)))


def _count(tensors: Sequence[torch.Tensor], dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """How many elements the tensors, in this precision, have of each of the sorted values."""
    total = torch.zeros(len(values), dtype=torch.int64)
    for tensor in tensors:
        on_device = values.to(tensor.device)
        for piece in torch.split(tensor, _BATCH):
            elements = _wide(piece.to(dtype))
            hits = elements[torch.isin(elements, on_device)]
            total += torch.searchsorted(on_device, hits).bincount(minlength=len(values)).cpu()
    return total


def _by_kind(tensors: Mapping[Key, torch.Tensor]) -> list[dict[Key, torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], dict[Key, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return list(kinds.values())


def _kind(tensors: Mapping[Key, torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    tensor = next(iter(tensors.values()))
    return tensor.dtype, tensor.device


def _key_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of 8 bytes' elements there must be two, or one value could not be told from a run of it."""
    return torch.float32 if dtype.itemsize == 8 else dtype


def _slots(keys: torch.Tensor, size: int) -> torch.Tensor:
    slots = keys * -0x61C8864680B583EB  # 2**64 divided by the golden ratio: Fibonacci hashing
    slots >>= 64 - size
    slots &= (1 << size) - 1
    return slots


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In a precision in which torch compares and sorts everything."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
