"""Adapters of PEFT: they keep names of their own under the layer that they adapt."""

from __future__ import annotations

from collections.abc import Sequence

from frozen_opt.errors import listing
from frozen_opt.names import Found, Walk

_TUNER_LAYERS = {
    "peft.tuners.tuners_utils.BaseTunerLayer": "base_layer",
    "peft.utils.other.AuxiliaryTrainingWrapper": "original_module",
    "peft.utils.other.ModulesToSaveWrapper": "original_module",
}


def adapter_warnings(walk: Walk, matched: Sequence[Found]) -> list[str]:
    """What to say where a list that means the base freezes adapters along with it."""
    if walk.classes.isdisjoint(_TUNER_LAYERS):
        return []
    base: set[int] = set()
    wrapped: set[int] = set()
    for layer in walk.wrappers:
        names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(layer).__mro__}
        for attribute in {_TUNER_LAYERS[name] for name in names & _TUNER_LAYERS.keys()}:
            wrapped.update(map(id, layer.parameters()))
            base.update(map(id, getattr(layer, attribute).parameters()))
    adapters = [found.name for found in matched if id(found.parameter) in wrapped - base]
    if not adapters or len(adapters) == len(matched):
        return []
    return [
        f"the list freezes {len(adapters)} parameters of adapters along with the base "
        f'({listing(adapters, 3)}): if they are to train, carve them out, such as "!*.lora_*"'
    ]
