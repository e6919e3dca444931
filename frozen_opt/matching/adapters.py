"""Adapters of PEFT: they keep names of their own under the layer that they adapt."""

from __future__ import annotations

from collections.abc import Sequence

from frozen_opt.errors import listing
from frozen_opt.matching.names import Found, Walk, wrapped_attribute

_ADAPTED = ("base_layer", "original_module")
"""Under these attributes PEFT keeps a layer that it adapts, beside its own; see `names`."""


def adapter_warnings(walk: Walk, matched: Sequence[Found]) -> list[str]:
    """What to say where a list that means the base freezes adapters along with it."""
    own: set[int] = set()
    for layer in walk.wrappers:
        attribute = wrapped_attribute(layer)
        base = layer._modules.get(attribute) if attribute in _ADAPTED else None
        if base is not None:
            own |= set(map(id, layer.parameters())) - set(map(id, base.parameters()))
    adapters = [found.name for found in matched if id(found.parameter) in own] if own else []
    if not adapters or len(adapters) == len(matched):
        return []
    return [
        f"the list freezes {len(adapters)} parameters of adapters along with the base "
        f'({listing(adapters, 3)}): if they are to train, carve them out, such as "!*.lora_*"'
    ]
