"""Is each frozen parameter still in the model, the same one and frozen? What every `verify` looks at.

The first look walks over the whole model, and notes what it passed, all of it weakly. As long as each module
still stands where it stood, the same parameters have the same names, so that the next look need not walk.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from frozen_opt.backends.registry import choose_backend
from frozen_opt.errors import FrozenParameterChangedError, listing
from frozen_opt.matching.names import Found, Walk, module_list, walk
from frozen_opt.matching.places import Place
from frozen_opt.matching.ways import Ways
from frozen_opt.parameters import Model
from frozen_opt.reports.freeze_report import FreezeReport

Sight = tuple[int, tuple[int, ...]]
"""Identity and shape of a parameter."""


@dataclass(frozen=True)
class Watch:
    """What a look at the whole model passed."""

    chunks: Sequence[weakref.ref[nn.Module]]
    ways: Ways
    places: Sequence[tuple[Place, Sight]]

    def holds(self, chunks: Sequence[nn.Module]) -> bool:
        """Is each module where it was, and each parameter what it was, without a gradient?"""
        if [reference() for reference in self.chunks] != chunks:
            return False
        if not self.ways.lead_there():
            return False
        for place, (identity, shape) in self.places:
            parameter = place()
            if parameter is None or id(parameter) != identity or parameter.requires_grad:
                return False
            if parameter.shape != shape:
                return False
        return True


def check(report: FreezeReport, model: Model) -> None:
    """Check that every frozen parameter is there, is what it was, and requires no gradient.

    Sharding, moving and loading after the freeze register new tensors: the first look takes what it finds.

    Raises:
        FrozenParameterChangedError: One is not.
    """
    chunks = module_list(model)
    if report._watch and report._watch[0].holds(chunks):
        return
    walked = walk(chunks)
    resting = choose_backend(walked).resting(walked)
    wanted = report.every_name
    watched = [found for found in walked.found if found.name in wanted]
    current = {found.name: resting.get(id(found.parameter), found.parameter) for found in watched}
    # An identity that was given out anew would pass: the flag is what matters, and `fingerprint` has values.
    now: dict[str, Sight] = {name: (id(it), tuple(it.shape)) for name, it in current.items()}
    faults = [*_faults(report, current, now)]
    if faults:
        raise FrozenParameterChangedError(f"role {report.role!r}: {'; '.join(faults)}")
    report._seen.update(now)
    # While FSDP2 shows gathered parameters in their place, there is nothing to compare the next time.
    at_rest = all(current[found.name] is found.parameter for found in watched)
    report._watch[:] = [_watch(walked, watched, now)] if at_rest else []


def _faults(report: FreezeReport, current: dict[str, nn.Parameter], now: dict[str, Sight]) -> Iterable[str]:
    seen = report._seen
    known = {name: before for name in now if (before := seen.get(name)) is not None}
    kinds = {
        "can be trained again: something called requires_grad_(True) after the freeze": [
            name for name, parameter in current.items() if parameter.requires_grad
        ],
        "is another tensor than before: a parameter was registered anew, or load_state_dict(assign=True) or "
        "an adapter merge put another one in its place": [
            name for name, (identity, _) in known.items() if identity != now[name][0]
        ],
        "has another shape than before: its data were swapped (resize_token_embeddings does so): resize "
        "before the freeze": [
            name
            for name, (identity, shape) in known.items()
            if (identity, shape) != now[name] and identity == now[name][0]
        ],
        "is no longer in the model: a module was replaced, or an adapter wrapped around it": [
            name for name in seen if name not in current
        ],
    }
    return [f"{listing(names)} {text}" for text, names in kinds.items() if names]


def _watch(walked: Walk, watched: Sequence[Found], now: dict[str, Sight]) -> Watch:
    return Watch(
        [weakref.ref(chunk) for chunk in walked.chunks],
        Ways(watched),
        [(found.place, now[found.name]) for found in watched],
    )
