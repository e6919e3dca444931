"""Watch a freeze for as long as training runs: cheaply at each step, by checksum at each checkpoint.

With torch.distributed up, every rank must call, and all of them raise the same error. A step costs one
walk over the module tree and one all-reduce of 3 integers; a fingerprint one pass over the frozen elements
that each rank holds, and one all-reduce of 4 integers a frozen parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from frozen_opt import ranks
from frozen_opt.backends import Backend, require_optimizers
from frozen_opt.errors import (
    FreezeConfigError,
    FrozenParameterChangedError,
    FrozenParameterInOptimizerError,
    UnsupportedBackendError,
    listing,
)
from frozen_opt.exclusion import prove_uncopied
from frozen_opt.shards import mixed_bits, resting_parameters

if TYPE_CHECKING:
    from frozen_opt.report import FreezeReport

T = TypeVar("T")
Model = nn.Module | Sequence[nn.Module]

Fingerprint = Mapping[str, Sequence[int]]
"""Canonical name -> four numbers, each summed over all ranks: hashes of the elements, how many elements
these were, hashes of the elements with their places, and a digest of who holds which part."""

_PRIME = (1 << 31) - 1


def verify(
    report: FreezeReport,
    model: Model,
    optimizer: object = None,
    *,
    fingerprint: Fingerprint | None = None,
    group: ranks.Group = None,
) -> None:
    """What `FreezeReport.verify` says."""
    if not report.patterns:
        return
    _together(lambda: _check(report, model, optimizer), report, group)
    if fingerprint is not None:
        now = take_fingerprint(report, model, group=group)
        _together(lambda: _compare(report, fingerprint, now), report, group)


def take_fingerprint(
    report: FreezeReport, model: Model, *, group: ranks.Group = None
) -> dict[str, list[int]]:
    """What `FreezeReport.fingerprint` says."""
    if not report.patterns:
        return {}
    table = _together(lambda: _checksums(report, model, ranks.rank(group)), report, group)
    return dict(zip(report.names, ranks.add_up(table, group).tolist(), strict=True))


def _together(work: Callable[[], T], report: FreezeReport, group: ranks.Group) -> T:
    """Do this rank's work, and raise on every rank if it failed on one."""
    done: list[T] = []
    error: Exception | None = None
    try:
        done.append(work())
    except Exception as raised:
        error = raised
    ranks.check_together(error, report.role, report.patterns, group)
    return done[0]


def _check(report: FreezeReport, model: Model, optimizer: object) -> None:
    current, backend = resting_parameters(model)
    seen = report._seen
    wanted = {*report.names, *(name for others in report.ties.values() for name in others)}
    missing = [name for name in seen if name not in current]
    watched = {name: parameter for name, parameter in current.items() if name in wanted}
    undone = [name for name, parameter in watched.items() if parameter.requires_grad]
    # Sharding, moving and loading after the freeze register new tensors. The first call takes what it finds.
    # An identity that was given out anew would pass: the flag is what matters, and `fingerprint` has values.
    now = {name: (id(parameter), tuple(parameter.shape)) for name, parameter in watched.items()}
    replaced: list[str] = []
    resized: list[str] = []
    for name, (identity, shape) in now.items():
        before = seen.get(name)
        if before is not None and before != (identity, shape):
            (replaced if before[0] != identity else resized).append(name)
    faults = [
        (undone, "can be trained again: something called requires_grad_(True) after the freeze"),
        (
            replaced,
            "is another tensor than before: a parameter was registered anew, or load_state_dict(assign=True) "
            "or an adapter merge put another one in its place",
        ),
        (
            resized,
            "has another shape than before: its data were swapped (resize_token_embeddings does so): resize "
            "before the freeze",
        ),
        (missing, "is no longer in the model: a module was replaced, or an adapter wrapped around it"),
    ]
    if any(names for names, _ in faults):
        texts = [f"{listing(names)} {text}" for names, text in faults if names]
        raise FrozenParameterChangedError(f"role {report.role!r}: {'; '.join(texts)}")
    if optimizer is not None:
        _check_optimizer(report, current, watched, optimizer, backend)
    seen.update(now)


def _check_optimizer(
    report: FreezeReport,
    current: Mapping[str, nn.Parameter],
    watched: Mapping[str, nn.Parameter],
    optimizer: object,
    backend: Backend,
) -> None:
    held = {id(tensor): tensor for _, tensors in require_optimizers(optimizer) for tensor in tensors}
    if caught := [name for name, parameter in watched.items() if id(parameter) in held]:
        raise FrozenParameterInOptimizerError(
            f"role {report.role!r}: the optimizer holds {listing(caught)}, which should be frozen: something "
            "called add_param_group with it, or built another optimizer. Give it "
            "frozen_opt.trainable_parameters(model)"
        )
    if held and held.keys().isdisjoint(map(id, current.values())):
        raise UnsupportedBackendError(
            f"role {report.role!r}: the optimizer holds none of the model's parameters, so nothing can be "
            "proved about it: pass the model that it trains, or teach frozen_opt this optimizer with "
            "register_backend"
        )
    prove_uncopied(f"role {report.role!r}", watched, current.values(), held, backend, report._second)


def _checksums(report: FreezeReport, model: Model, rank: int) -> torch.Tensor:
    """This rank's share of the fingerprint; sums of a million ranks' rows stay below 2**63."""
    _check(report, model, None)
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


def _compare(report: FreezeReport, saved: Fingerprint, now: Fingerprint) -> None:
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
