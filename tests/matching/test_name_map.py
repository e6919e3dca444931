"""More names by a name map: a pattern may use any of them, and a fused tensor is whole or left alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import frozen_opt
from frozen_opt import FreezeConfigError, FrozenParameterInOptimizerError, UnmatchedPatternError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2, 6, bias=False)
        self.router = nn.Linear(2, 4, bias=False)


def build() -> nn.Module:
    return nn.Sequential(Layer(), Layer())


def string(name: str) -> str:
    return f"hf.{name}".replace("router", "mlp.gate").replace("qkv", "attn.qkv")


def several(name: str) -> list[str]:
    return [string(name), f"alias.{name}"]


def parts(name: str) -> Any:
    """What fused tensors hold, and one name for all others."""
    if "qkv" not in name:
        return string(name)
    return {part: f"hf.{name}".replace("qkv", f"{part}_proj") for part in "qkv"}


def nothing(name: str) -> None:
    return None


class Registry:
    """As Megatron-Bridge's mapping registry looks names up."""

    def megatron_to_hf_lookup(self, name: str) -> Any:
        return None if "1.router" in name else SimpleNamespace(hf_param=parts(name))


ROUTERS = ("0.router.weight", "1.router.weight")
QKV = ("0.qkv.weight", "1.qkv.weight")


@pytest.mark.parametrize(
    ("name_map", "patterns", "frozen"),
    [
        (string, ["*.mlp.gate.weight"], ROUTERS),
        (string, ["hf.0.*"], ("0.qkv.weight", "0.router.weight")),
        (string, ["*.router.weight"], ROUTERS),  # the canonical name still counts
        (
            several,
            ["alias.?.router.*", "hf.1.attn.*"],
            ("0.router.weight", "1.qkv.weight", "1.router.weight"),
        ),
        (parts, ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"], QKV),
        (parts, ["hf.0.[qkv]_proj.weight"], QKV[:1]),
        (parts, ["*.qkv.weight"], QKV),
        (parts, ["*.mlp.gate.weight"], ROUTERS),
        (nothing, ["*.router.weight"], ROUTERS),
        (Registry(), ["*.mlp.gate.weight"], ROUTERS[:1]),
        (Registry(), ["1.router.weight", "*.?_proj.weight"], (*QKV, ROUTERS[1])),
        # a carve-out in other names than what it takes away from
        (string, ["*", "!*.mlp.gate.weight"], QKV),
        (string, ["*.router.weight", "!hf.1.*"], ROUTERS[:1]),
        (parts, ["0.*", "!*_proj.weight"], ROUTERS[:1]),
        (parts, ["*", "!*.q_proj.*", "!*.k_proj.*", "!*.v_proj.*"], ROUTERS),
    ],
)
def test_patterns_use_any_of_the_names(name_map: Any, patterns: list[str], frozen: tuple[str, ...]) -> None:
    model = build()
    report = frozen_opt.freeze_parameters(model, patterns, role="policy", name_map=name_map)
    assert set(report.names) == set(frozen)
    assert {name for name, value in model.named_parameters() if not value.requires_grad} == set(frozen)
    assert all(report.matches.values())


@pytest.mark.parametrize(
    ("patterns", "chosen", "rest"),
    [
        (["hf.0.q_proj.weight"], "q", "kv"),
        (["*.q_proj.weight", "*.v_proj.weight"], "qv", "k"),
        (["*", "!*.q_proj.weight"], "kv", "q"),
        (["*.qkv.weight", "!*.[qk]_proj.weight"], "v", "qk"),
    ],
)
def test_part_of_a_fused_tensor_is_refused(patterns: list[str], chosen: str, rest: str) -> None:
    model = build()
    with pytest.raises(FreezeConfigError) as refusal:
        frozen_opt.freeze_parameters(model, patterns, role="policy", name_map=parts)
    text = str(refusal.value)
    names = {part: f"hf.0.{part}_proj.weight" for part in "qkv"}
    assert f"{', '.join(names[part] for part in chosen)} is stored in one tensor (0.qkv.weight)" in text
    assert f"freeze {', '.join(names[part] for part in rest)} as well, or none of them" in text
    assert all(value.requires_grad for value in model.parameters())


def test_ties_are_matched_by_all_their_mapped_names() -> None:
    model = build()
    model[1].router.weight = model[0].router.weight
    for pattern in ("hf.0.mlp.gate.weight", "hf.1.mlp.gate.weight"):
        plan = frozen_opt.plan_freezing(model, [pattern], role="policy", name_map=string)
        assert (plan.names, plan.ties) == (ROUTERS[:1], {ROUTERS[0]: ROUTERS[1:]})
    with pytest.raises(FreezeConfigError, match="one tensor under different names"):
        frozen_opt.plan_freezing(model, ["*", "!hf.1.mlp.*"], role="policy", name_map=string)


def test_a_pattern_that_fits_no_name_shows_the_closest_mapped_one() -> None:
    with pytest.raises(UnmatchedPatternError, match=r"hf\.0\.mlp\.gate\.weight"):
        frozen_opt.plan_freezing(build(), ["*.mlp.gates.weight"], role="policy", name_map=string)


def test_the_proof_knows_mapped_names() -> None:
    """The factory puts a fresh tensor under a name that only the name map ties to the pattern."""

    @frozen_opt.with_freezing("policy", patterns=["hf.0.mlp.*"], name_map=string)
    def factory(model: Any) -> Any:
        import torch

        model[0].router.weight = nn.Parameter(torch.zeros(4, 2))
        return torch.optim.SGD(model.parameters())

    with pytest.raises(FrozenParameterInOptimizerError, match=r"0\.router\.weight"):
        factory(build())
