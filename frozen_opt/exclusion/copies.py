"""What an optimizer holds of frozen parameters beside themselves: their memory, and copies of their values.

A tensor from outside the model may be one parameter's master, one flat tensor of many in any order, with
padding, in another precision, or the part of such a tensor that one rank holds. Frozen values never move,
and a master that is written back to the model equals them in the model's precision after every step: so it
is found when the optimizer is built, and later as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from frozen_opt.exclusion.search import Spot, search, surplus

Read = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Copies:
    """What tensors from outside the model hold of its frozen parameters, by name."""

    held: list[str] = field(default_factory=list)
    """Copies of these, whole or in part."""
    unclear: list[str] = field(default_factory=list)
    """They hold masters of other parameters, among which these (all zeros, or a few numbers) may be."""
    second: dict[str, int] = field(default_factory=dict)
    """Copies that a second network has, which started from equal weights, and how many of them."""


def find_copies(
    frozen: Mapping[str, torch.Tensor],
    trainable: Iterable[torch.Tensor],
    held: Mapping[int, torch.Tensor],
    foreign: Sequence[torch.Tensor],
    read: Read,
    second: Mapping[str, int],
) -> Copies:
    """Search the tensors that an optimizer holds and the model does not own for frozen values.

    An optimizer of masters steps these in place of the parameters. One that steps a parameter, and a copy of
    it as well, trains two networks: what is frozen in the first has a copy in the second.

    Args:
        frozen: The frozen parameters, by name.
        trainable: The other ones of the model that require a gradient.
        held: What the optimizer holds, by id.
        foreign: That of it which is not the model's.
        read: Gives this rank's elements of a parameter, as `Backend.elements` does.
        second: `Copies.second` of an earlier search. After a step the two networks' weights differ, where
            they are not frozen in both.
    """
    readable = [(tensor, elements) for tensor in foreign for elements in _elements([tensor], read)]
    if not readable:
        return Copies()
    hay = [elements for _, elements in readable]
    needles = {name: elements for name, tensor in frozen.items() for elements in _elements([tensor], read)}
    spots, poor = search(needles, hay)
    if not spots and not poor:
        return Copies()
    trainable = list(trainable)
    missing = _elements([tensor for tensor in trainable if id(tensor) not in held], read)
    # A trainable parameter of equal values has a master of equal values.
    rivals = _by_sample(missing) if spots else {}
    for name, places in list(spots.items()):
        alike = rivals.get(_sample(needles[name]), ())
        if len(places) <= sum(torch.equal(needles[name], other) for other in alike):
            del spots[name]
    mastered = bool(_places(missing, hay))
    stepped = _elements([tensor for tensor in trainable if id(tensor) in held], read) if spots else []
    networks = max(map(len, _places(stepped, hay)), default=0)
    result = Copies()
    for name, places in spots.items():
        shape = frozen[name].shape
        whole = all(start == 0 and readable[which][0].shape == shape for which, start in places)
        if whole and not mastered and len(places) <= max(networks, second.get(name, 0)):
            result.second[name] = len(places)
        else:
            result.held.append(name)
    if mastered:
        result.unclear = surplus({name: needles[name] for name in poor if name not in spots}, hay, missing)
    return result


def _places(tensors: Sequence[torch.Tensor], hay: Sequence[torch.Tensor]) -> list[list[Spot]]:
    numbered = {str(number): tensor for number, tensor in enumerate(tensors)}
    return list(search(numbered, hay)[0].values())


def _elements(tensors: Iterable[torch.Tensor], read: Read) -> list[torch.Tensor]:
    """This rank's elements of those that have floating-point ones which can be compared."""
    parts = []
    for tensor in tensors:
        elements = read(tensor).detach()
        if elements.is_complex():
            elements = torch.view_as_real(elements)
        if elements.is_floating_point() and elements.numel():
            parts.append(elements.flatten())
    return parts


def _by_sample(tensors: Iterable[torch.Tensor]) -> dict[object, list[torch.Tensor]]:
    samples: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        samples.setdefault(_sample(tensor), []).append(tensor)
    return samples


def _sample(tensor: torch.Tensor) -> object:
    """What tensors of equal values have in common, and few others."""
    return tensor.dtype, tensor.device, tensor.numel(), *tensor[:8].tolist()
