"""Resume is never silent: states tell their freeze list, in each form in which torch saves them."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import frozen_opt
from frozen_opt import ResumeMismatchError, migrate_optimizer_state, with_freezing
from frozen_opt.optimizers_by_name import build_optimizer
from tests.models import train, transformer
from tests.versions import needs_muon

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
THEN = ["layers.0.mlp.experts.0.weight", "*.gate.weight"]
ALIKE = ["layers.1.mlp.experts.0.weight", "*.gate.weight"]  # as many, of the same shapes
OTHERS = {"alike": ALIKE, "less": ["*.gate.weight"], "more": [*THEN, "embedding.weight"]}


def by_number(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01)


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(frozen_opt.trainable_named_parameters(model), lr=0.01)


def in_groups(model: nn.Module) -> Any:
    return build_optimizer(model, {"optimizer_config": {"lr": 0.01, "weight_decay": 0.1}})


def hybrid(model: nn.Module) -> Any:
    return build_optimizer(model, {"optimizer_config": {"optimizer": "Muon", "lr": 0.01}})


def run(
    patterns: list[str], factory: Callable[[nn.Module], Any] = by_number, steps: int = 0
) -> tuple[Any, Any]:
    frozen_opt.reset()
    model = transformer()
    optimizer = with_freezing("policy", patterns=patterns)(factory)(model)
    train(model, optimizer, steps=steps)
    return model, optimizer


def states(model: nn.Module, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in frozen_opt.named_parameters(model)
        if parameter in optimizer.state
    }


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name][key]) for name, state in one.items() for key, value in state.items()
    )


class Numbers:
    """torch.save of `optimizer.state_dict()`."""

    options = None

    @staticmethod
    def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    @staticmethod
    def load(model: nn.Module, optimizer: Any, folder: Path) -> None:
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    @staticmethod
    def read(model: nn.Module, optimizer: Any, folder: Path) -> Any:
        return torch.load(folder / "optimizer.pt", weights_only=True)


class Nested:
    """torch.distributed.checkpoint, by names."""

    options = StateDictOptions()

    @classmethod
    def save(cls, model: nn.Module, optimizer: Any, folder: Path) -> None:
        state = get_optimizer_state_dict(model, optimizer, options=cls.options)
        dcp.save({"optimizer": state}, checkpoint_id=folder)

    @classmethod
    def load(cls, model: nn.Module, optimizer: Any, folder: Path) -> None:
        set_optimizer_state_dict(model, optimizer, cls.read(model, optimizer, folder), options=cls.options)

    @classmethod
    def read(cls, model: nn.Module, optimizer: Any, folder: Path) -> Any:
        state = get_optimizer_state_dict(model, optimizer, options=cls.options)
        dcp.load({"optimizer": state}, checkpoint_id=folder)
        return state


class Flattened(Nested):
    """As torchtitan saves it."""

    options = FLAT


FORMS = [Numbers, Nested, Flattened]
# torch.distributed.checkpoint wants an optimizer with one state: not the hybrid.
SAVED = [
    *[(form, factory) for form in FORMS for factory in (by_number, by_name, in_groups)],
    pytest.param(Numbers, hybrid, marks=needs_muon),
]


@pytest.mark.parametrize(("form", "factory"), SAVED)
def test_the_same_list_loads_bit_identically(
    form: Any, factory: Any, tmp_path: Path, logs: list[Any]
) -> None:
    model, optimizer = run(THEN, factory, steps=2)
    before = states(model, optimizer)
    form.save(model, optimizer, tmp_path)
    model, optimizer = run(THEN, factory)
    form.load(model, optimizer, tmp_path)
    assert before
    assert same(states(model, optimizer), before)
    assert [record for record in logs if record["level"].name == "WARNING"] == []


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(("form", "factory"), SAVED)
def test_case_34_another_list_is_refused_and_moved(
    form: Any, factory: Any, other: str, tmp_path: Path
) -> None:
    model, optimizer = run(THEN, factory, steps=2)
    before = states(model, optimizer)
    form.save(model, optimizer, tmp_path)
    model, optimizer = run(OTHERS[other], factory)
    # What torch.distributed.checkpoint finds no state for it refuses itself: "Missing key in checkpoint".
    by_torch = form is not Numbers and other != "more"
    with pytest.raises(dcp.api.CheckpointException if by_torch else ResumeMismatchError) as caught:
        form.load(model, optimizer, tmp_path)
    if by_torch:
        assert "Missing key in checkpoint state_dict: optimizer.state.layers.0" in str(caught.value)
    if form is Numbers and other == "alike":
        assert caught.value.now_trainable == ("layers.0.mlp.experts.0.weight",)
        assert caught.value.now_frozen == ("layers.1.mlp.experts.0.weight",)

    # The way out: load under the list of the checkpoint, then change the list.
    model, optimizer = run(THEN, factory)
    saved = form.read(model, optimizer, tmp_path)
    optimizer = with_freezing("policy", patterns=OTHERS[other])(factory)(model)
    optimizer.load_state_dict(migrate_optimizer_state(saved, optimizer, model))
    trained = [name for name, _ in frozen_opt.trainable_named_parameters(model)]
    assert same(states(model, optimizer), {name: before[name] for name in trained if name in before})
    train(model, optimizer, steps=1)
    assert states(model, optimizer).keys() == set(trained)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_without_a_trace_loads_as_before_with_a_warning(
    form: Any, tmp_path: Path, logs: list[Any]
) -> None:
    model = transformer()
    frozen_opt.freeze_parameters(model, THEN, role="policy")
    optimizer = by_number(model)  # no decorated factory
    train(model, optimizer, steps=2)
    before = states(model, optimizer)
    form.save(model, optimizer, tmp_path)
    model, optimizer = run(THEN)
    form.load(model, optimizer, tmp_path)
    assert same(states(model, optimizer), before)
    (warning,) = [record["message"] for record in logs if record["level"].name == "WARNING"]
    assert "has no trace of its freeze list" in warning


@pytest.mark.parametrize("form", FORMS)
def test_a_state_with_a_trace_loads_into_any_optimizer(form: Any, tmp_path: Path) -> None:
    model, optimizer = run(THEN, steps=2)
    before = states(model, optimizer)
    form.save(model, optimizer, tmp_path)
    model = transformer()
    frozen_opt.freeze_parameters(model, THEN, role="other")
    optimizer = by_number(model)
    form.load(model, optimizer, tmp_path)
    assert same(states(model, optimizer), before)
    train(model, optimizer, steps=1)


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_list_changes_no_saved_byte(form: Any, tmp_path: Path) -> None:
    saved = []
    for decorate in (lambda factory: factory, with_freezing("policy", patterns=[])):
        frozen_opt.reset()
        model = transformer()
        optimizer = decorate(by_number)(model)
        train(model, optimizer, steps=1)
        file = io.BytesIO()
        by_torch = get_optimizer_state_dict(model, optimizer, options=form.options)
        torch.save(optimizer.state_dict() if form is Numbers else by_torch, file)
        saved.append(file.getvalue())
    assert saved[0] == saved[1]


def test_a_list_of_optimizers_is_moved_as_one() -> None:
    def halves(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        named = frozen_opt.trainable_named_parameters(model)
        layers = [parameter for name, parameter in named if name.startswith("layers")]
        rest = [parameter for name, parameter in named if not name.startswith("layers")]
        return {"layers": torch.optim.AdamW(layers), "rest": torch.optim.SGD(rest, lr=0.1, momentum=0.9)}

    frozen_opt.reset()
    model = transformer()
    optimizers = with_freezing("policy", patterns=THEN)(halves)(model)
    for _ in range(2):
        model(torch.tensor([[1, 2, 3]])).square().mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()
    before = {name: states(model, each) for name, each in optimizers.items()}
    saved = copy.deepcopy({name: each.state_dict() for name, each in optimizers.items()})
    optimizers = with_freezing("policy", patterns=["*.gate.weight"])(halves)(model)
    for name, state in migrate_optimizer_state(saved, optimizers, model).items():
        optimizers[name].load_state_dict(state)
    for name, optimizer in optimizers.items():
        assert same(states(model, optimizer), before[name])
    in_order = [optimizers["layers"], optimizers["rest"]]
    listed = migrate_optimizer_state([each.state_dict() for each in in_order], in_order, model)
    assert [len(state["state"]) for state in listed] == [len(each.state) for each in in_order]


def test_calling_the_factory_again_over_one_optimizer_leaves_one_trace() -> None:
    model, optimizer = run(THEN)
    decorate = with_freezing("policy", patterns=[*THEN, "embedding.weight"])
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError):
        decorate(lambda model: optimizer)(model)
    with_freezing("policy", patterns=THEN)(lambda model: optimizer)(model)
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_verify_tells_a_parameter_that_was_resized() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, intermediate_size=16, head_dim=8, **sizes))
    report = frozen_opt.freeze_parameters(model, ["model.embed_tokens.weight"], role="policy")
    report.verify(model)
    model.resize_token_embeddings(40)
    with pytest.raises(
        frozen_opt.FrozenParameterChangedError, match=r"embed_tokens\.weight has another shape"
    ):
        report.verify(model)
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
    report = frozen_opt.freeze_parameters(net, ["a.weight"], role="policy")
    report.verify(net)
    net["a"].weight.data = torch.zeros(3, 2)
    with pytest.raises(frozen_opt.FrozenParameterChangedError, match=r"a\.weight has another shape"):
        report.verify(net)
