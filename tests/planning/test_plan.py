"""Planning: what is refused, with which words, and that planning changes nothing."""

import contextlib
import gc
import re
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import frozen_opt
from frozen_opt.matching.order import in_model_order
from frozen_opt.parameters import named_parameters
from tests.models import flags, transformer


def test_planning_changes_nothing_and_applying_freezes() -> None:
    model = transformer()
    plan = frozen_opt.plan_freezing(model, ["*.gate.weight", "!layers.1.*"], role="policy")
    assert all(flags(model).values())
    assert frozen_opt.report("policy").parameter_count == 0
    assert (plan.names, plan.parameter_count, plan.element_count) == (("layers.0.mlp.gate.weight",), 1, 16)
    report = plan.apply()
    assert [name for name, flag in flags(model).items() if not flag] == list(plan.names)
    assert (report.names, report.matches) == (plan.names, plan.matches)
    assert report.backend == "torch"
    assert frozen_opt.report("policy") is report


def test_an_empty_plan_applies_to_nothing() -> None:
    model = transformer()
    report = frozen_opt.plan_freezing(model, None, role="policy").apply()
    assert (report.parameter_count, report.names) == (0, ())
    assert all(flags(model).values())


def test_every_unmatched_pattern_is_named_with_the_closest_names() -> None:
    model = transformer()
    with pytest.raises(frozen_opt.UnmatchedPatternError) as caught:
        frozen_opt.freeze_parameters(
            model, ["*.mlp.gates.weight", "head.weight", "embeding.weight", "!*.norm.*"], role="critic"
        )
    text = str(caught.value)
    assert "role 'critic'" in text
    assert re.search(
        r"'\*\.mlp\.gates\.weight' matches no parameter; the closest names: layers\.0\.mlp\.gate", text
    )
    assert re.search(r"'embeding\.weight' matches no parameter; the closest names: embedding\.weight", text)
    assert "'!*.norm.*' takes nothing away" in text
    assert "'head.weight' matches no" not in text
    assert all(flags(model).values())


def test_case_02_a_prefix_that_does_not_exist_is_an_error_with_the_real_name() -> None:
    model = nn.ModuleDict({"text_model": nn.ModuleDict({"norm": nn.LayerNorm(2), "layer": nn.Linear(2, 2)})})
    with pytest.raises(frozen_opt.UnmatchedPatternError, match=r"closest names: text_model\.norm\.weight"):
        frozen_opt.freeze_parameters(model, ["text_model.model.norm.weight"], role="policy")


def test_case_04_either_name_of_a_tied_parameter_freezes_it_once() -> None:
    for pattern in ("head.weight", "embedding.weight", "*"):
        model = transformer(tied=True)
        patterns = [pattern] if pattern != "*" else ["embedding.*", "head.*"]
        report = frozen_opt.freeze_parameters(model, patterns, role="policy")
        assert not model.head.weight.requires_grad
        assert report.names == ("embedding.weight",)
        assert report.ties == {"embedding.weight": ("head.weight",)}
        assert report.element_count == 88
        assert set(report.matches.values()) == {1}


def test_case_04_on_a_real_tied_model() -> None:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    report = frozen_opt.freeze_parameters(model, ["lm_head.weight"], role="policy")
    assert report.names == ("model.embed_tokens.weight",)
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    "shared", [lambda: nn.Linear(2, 2), lambda: nn.Sequential(nn.Linear(2, 2, bias=False))]
)
@pytest.mark.parametrize("first", ["one", "other"])
def test_a_module_in_two_places_ties_its_parameters(shared: Callable[[], nn.Module], first: str) -> None:
    block = shared()
    model = nn.ModuleDict({"one": block, "other": block, "head": nn.Linear(2, 2)})
    (*_, name) = (name for name, _ in block.named_parameters())
    report = frozen_opt.freeze_parameters(model, [f"{first}.{name}"], role="policy")
    assert report.ties == {f"one.{name}": (f"other.{name}",)}
    with pytest.raises(frozen_opt.FreezeConfigError, match="are one tensor"):
        frozen_opt.freeze_parameters(model, ["o*", f"!other.{name}"], role="policy")


def test_a_carve_out_that_splits_a_tie_is_an_error() -> None:
    model = transformer(tied=True)
    with pytest.raises(
        frozen_opt.FreezeConfigError, match=r"embedding\.weight and head\.weight are one tensor"
    ):
        frozen_opt.freeze_parameters(model, ["*.weight", "!head.*"], role="policy")
    assert all(flags(model).values())


@pytest.mark.parametrize("patterns", [["*"], ["layers.*", "embedding.*", "head.*"]])
def test_nothing_left_to_train_is_an_error(patterns: list[str]) -> None:
    model = nn.ModuleDict({"embedding": nn.Linear(1, 1), "layers": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
    expected = frozen_opt.NothingTrainableError
    with pytest.raises(expected, match="nothing is left to train"):
        frozen_opt.freeze_parameters(model, patterns, role="policy")
    assert all(flags(model).values())


@pytest.mark.parametrize("model", [None, "qwen", torch.zeros(2), [], [nn.Linear(1, 1), "head"], nn.Linear])
def test_what_is_no_module_is_refused(model: object) -> None:
    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"torch\.nn\.Module"):
        frozen_opt.freeze_parameters(model, ["*"], role="policy")  # type: ignore[arg-type]


def test_buffers_are_never_touched() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("gate", torch.ones(2))
    with pytest.raises(frozen_opt.UnmatchedPatternError):
        frozen_opt.freeze_parameters(model, ["1.gate"], role="policy")
    frozen_opt.freeze_parameters(model, ["0.*"], role="policy")
    assert model[0].running_mean is not None
    model(torch.randn(8, 2))
    assert model[0].running_mean.abs().sum() > 0


def test_the_error_names_ten_and_counts_the_rest() -> None:
    model = transformer(layers=6)
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError, match=r"holds 12 .* and 2 more"):
        frozen_opt.with_freezing("policy", patterns=["*.experts.*"])(
            lambda model: torch.optim.SGD(model.parameters())
        )(model)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.randoms(use_true_random=False))
def test_parts_of_a_model_merge_in_model_order(parts: int, random: object) -> None:
    """Layers and experts dealt out to ranks in any way come back in the order of the whole model."""
    names = [name for name, _ in named_parameters(transformer(layers=12))]
    holders: list[list[str]] = [[] for _ in range(parts)]
    inner = [name for name in names if name.startswith("layers")]
    dealt = {layer: random.randrange(parts) for layer in range(12)}  # type: ignore[attr-defined]
    holders[0].append("embedding.weight")
    for name in inner:
        holders[dealt[int(name.split(".")[1])]].append(name)
    holders[-1].append("head.weight")
    rows = {name: name for held in holders for name in held}
    merged = in_model_order(rows)
    assert merged == [names[0], *inner, names[-1]]


def test_a_plan_that_the_model_has_outlived_freezes_nothing() -> None:
    model = transformer()
    plan = frozen_opt.plan_freezing(model, ["embedding.weight", "head.weight"], role="policy")
    kept = model.head
    model.head = nn.Linear(8, 11, bias=False)
    with pytest.raises(
        frozen_opt.FreezeConfigError, match=r"modules of head\.weight were replaced: plan again"
    ):
        plan.apply()
    assert all(flags(model).values())
    assert kept.weight.requires_grad
    assert frozen_opt.report("policy").parameter_count == 0


def test_a_plan_freezes_what_stands_in_the_place_by_now() -> None:
    """Sharding and loading register other tensors under the attributes that were planned for."""
    model = transformer()
    plan = frozen_opt.plan_freezing(model, ["head.weight"], role="policy")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    plan.apply()
    assert not model.head.weight.requires_grad


def test_a_plan_keeps_no_parameter_alive_and_prints_none() -> None:
    model = transformer()
    gone = weakref.ref(model.head.weight)
    plan = frozen_opt.plan_freezing(model, ["head.weight"], role="policy")
    model.head.weight = nn.Parameter(torch.zeros(11, 8))
    assert gone() is None
    assert "tensor(" not in repr(plan)


def test_neither_a_walk_nor_an_error_keeps_a_model_alive() -> None:
    gc.disable()
    try:
        model = transformer()
        gone = weakref.ref(model.head.weight)
        frozen_opt.trainable_parameters(model)
        with contextlib.suppress(frozen_opt.UnsupportedBackendError):
            frozen_opt.with_freezing("policy", patterns=["head.weight"])(lambda model: None)(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_the_factorys_own_error_comes_through_whatever_it_left_behind() -> None:
    model = transformer()

    def factory(model: nn.Module) -> None:
        model.head.weight = model.embedding.weight  # a tie that the patterns split
        raise MemoryError("CUDA out of memory")

    patterns = ["*.norm.*", "*.weight", "!head.*", "!layers.0.*"]
    with pytest.raises(MemoryError):
        frozen_opt.with_freezing("policy", patterns=patterns)(factory)(model)
    assert all(flags(model).values())


def test_a_name_with_glob_characters_is_told_how_to_write_it() -> None:
    model = nn.ParameterDict({"w[0]": torch.ones(1), "v": torch.ones(1)})
    with pytest.raises(frozen_opt.UnmatchedPatternError, match=r"'w\[0\]' itself write 'w\[\[\]0\]'"):
        frozen_opt.freeze_parameters(model, ["w[0]"], role="policy")
    assert frozen_opt.freeze_parameters(model, ["w[[]0]"], role="policy").parameter_count == 1


def test_lazy_parameters_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"0\.weight, 0\.bias has no shape yet"):
        frozen_opt.freeze_parameters(model, ["0.*"], role="policy")
    model(torch.ones(1, 3))
    assert frozen_opt.freeze_parameters(model, ["0.*"], role="policy").element_count == 8


def test_a_pattern_that_stands_twice_is_judged_twice() -> None:
    patterns = ["embedding.*", "!head.*", "head.*", "!head.*", "layers.0.*"]
    with pytest.raises(frozen_opt.UnmatchedPatternError, match=r"'!head\.\*' takes nothing away"):
        frozen_opt.freeze_parameters(transformer(), patterns, role="policy")
