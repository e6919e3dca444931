"""Checksums of the frozen values, and their comparison with those that a checkpoint holds.

A fingerprint is one pass over the frozen elements that each rank holds, and one all-reduce of 4 integers a
frozen parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from frozen_opt.backends.bits import mixed_bits
from frozen_opt.errors import FreezeConfigError, FrozenParameterChangedError, listing
from frozen_opt.guards.presence import check
from frozen_opt.parameters import Model, resting_parameters
from frozen_opt.ranks import collectives
from frozen_opt.reports.freeze_report import Fingerprint, FreezeReport

_PRIME = (1 << 31) - 1


def take_fingerprint(
    report: FreezeReport, model: Model, *, group: collectives.Group = None
) -> dict[str, list[int]]:
    """What `FreezeReport.fingerprint` says."""
    if not report.patterns:
        return {}
    rank = collectives.rank(group)
    table = collectives.together(lambda: _checksums(report, model, rank), report.role, report.patterns, group)
    return dict(zip(report.names, collectives.add_up(table, group).tolist(), strict=True))


def _checksums(report: FreezeReport, model: Model, rank: int) -> torch.Tensor:
    """This rank's share of the fingerprint; sums of a million ranks' rows stay below 2**63."""
    check(report, model)
    current, backend = resting_parameters(model)
    table = torch.zeros(len(report.names), 4, dtype=torch.int64)
    for row, name in zip(table, report.names, strict=True):
        if name not in current:
            continue  # another pipeline stage, or another expert's rank
        elements = backend.elements(current[name])
        content = place = torch.zeros((), dtype=torch.int64, device=elements.device)
        for values, places in mixed_bits(elements, salt=rank):
            content = (content + values.sum()) % _PRIME
            place = (place + places.sum()) % _PRIME
        layout = hashlib.blake2b(f"{rank} {tuple(elements.shape)}".encode(), digest_size=3).digest()
        row[:] = torch.tensor([int(content), elements.numel(), int(place), int.from_bytes(layout)])
    return table


def compare(report: FreezeReport, saved: Fingerprint, now: Fingerprint) -> None:
    """Raise unless the values are those of a saved fingerprint; see `FreezeReport.verify`."""
    for name in report.names:
        numbers = saved.get(name)
        if numbers is None:
            raise FreezeConfigError(
                f"role {report.role!r}: the fingerprint lacks {listing([name])}, so it was taken of another "
                "freeze: compare the two with report.check_resume(saved), then take a new fingerprint"
            )
        if not isinstance(numbers, Sequence) or [type(number) for number in numbers] != [int] * 4:
            raise FreezeConfigError(
                f"role {report.role!r}: what the fingerprint has for {listing([name])} is no fingerprint: "
                "pass on what report.fingerprint(model) returned"
            )
    changed = [name for name in report.names if _differ(saved[name], now[name])]
    if changed:
        raise FrozenParameterChangedError(
            f"role {report.role!r}: the values of {listing(changed)} changed, though nothing trains them: "
            "another checkpoint was loaded over them, an adapter was merged, something wrote to them in "
            "place (an optimizer that was built before the freeze, for one), or memory is faulty"
        )


def _differ(saved: Sequence[int], now: Sequence[int]) -> bool:
    content, elements, place, layout = saved
    new_content, new_elements, new_place, new_layout = now
    # On other ranks each element may be held more often or less; per element held the sum is the same.
    if (content * new_elements - new_content * elements) % _PRIME:
        return True
    return layout == new_layout and (elements, place) != (new_elements, new_place)
