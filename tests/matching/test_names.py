"""Canonical names: those of the bare tree, whatever wraps it and wherever."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.optim.swa_utils import AveragedModel

import frozen_opt
from frozen_opt.parameters import named_parameters, trainable_named_parameters, trainable_parameters
from tests.models import transformer

# What wrappers call their child is what an architecture might call its own.
COMPONENTS = [
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "model", "0", "1", "layers",
]  # fmt: skip


class HFModelWrapper(nn.Module):
    """Stands in for SkyRL's wrapper, which does not install here: its name and attribute are what counts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


HFModelWrapper.__module__ = "skyrl_train.model_wrapper"

WRAPPERS: dict[str, Any] = {
    "compile": lambda module: torch.compile(module, backend="eager"),
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "average": lambda module: AveragedModel(module),
    "parallel": lambda module: nn.DataParallel(module),
    "skyrl": HFModelWrapper,
}


class Tree(nn.Module):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        for name in spec["parameters"]:
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))
        self.register_parameter("absent", None)
        for name, child in spec["children"].items():
            self.add_module(name, Tree(child))


specs = st.recursive(
    st.fixed_dictionaries(
        {"parameters": st.lists(st.sampled_from(["w", "weight"]), unique=True), "children": st.just({})}
    ),
    lambda inner: st.fixed_dictionaries(
        {
            "parameters": st.lists(st.sampled_from(["w", "weight"]), unique=True),
            "children": st.dictionaries(st.sampled_from(COMPONENTS), inner, max_size=3),
        }
    ),
    max_leaves=12,
)


def wrap_at_random(module: nn.Module, draw: Any) -> nn.Module:
    for name, child in list(module.named_children()):
        setattr(module, name, wrap_at_random(child, draw))
    # unique, since torch.compile of a compiled module is no module
    for kind in draw(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3, unique=True)):
        module = WRAPPERS[kind](module)
    return module


@settings(max_examples=150, deadline=None)
@given(specs, st.data())
def test_any_nesting_of_wrappers_gives_the_bare_names(spec: dict[str, Any], data: Any) -> None:
    tree = Tree(spec)
    bare = [name for name, _ in tree.named_parameters()]
    wrapped = wrap_at_random(tree, data.draw)
    assert [name for name, _ in named_parameters(wrapped)] == bare


def test_torch_agrees_on_its_own_wrappers() -> None:
    """torch.distributed.checkpoint strips names as well, for DDP-like roots, compile and checkpointing."""
    model = transformer()
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(checkpoint_wrapper(layer), backend="eager")
    wrapped = torch.compile(model, backend="eager")
    for raw, parameter in wrapped.named_parameters():
        canonical = [name for name, other in named_parameters(wrapped) if other is parameter]
        assert set(canonical) == _get_fqns(wrapped, raw)


@pytest.mark.parametrize("where", ["root", "layers"])
def test_case_08_compiled_names_are_the_uncompiled_ones(where: str) -> None:
    model = transformer()
    names = [name for name, _ in model.named_parameters()]
    if where == "layers":
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    assert [name for name, _ in model.named_parameters()] != names
    assert [name for name, _ in named_parameters(model)] == names
    report = frozen_opt.freeze_parameters(model, ["layers.0.mlp.*"], role="policy")
    assert report.parameter_count == 3


def test_case_14_parameters_that_are_none_are_skipped() -> None:
    model = nn.Linear(2, 2, bias=False)
    assert hasattr(model, "bias")
    assert [name for name, _ in named_parameters(model)] == ["weight"]
    with pytest.raises(frozen_opt.UnmatchedPatternError):
        frozen_opt.freeze_parameters(model, ["bias"], role="policy")


def test_a_tied_parameter_has_all_its_names_but_is_trained_once() -> None:
    model = transformer(tied=True)
    names = [name for name, parameter in named_parameters(model) if parameter is model.head.weight]
    assert names == ["embedding.weight", "head.weight"]
    assert [name for name, _ in trainable_named_parameters(model)] == [
        name for name, _ in model.named_parameters()
    ]
    assert all(map(torch.Tensor.is_set_to, trainable_parameters(model), model.parameters()))


def test_a_module_that_holds_its_ancestor_ends_the_walk() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].owner = model
    assert [name for name, _ in named_parameters(model)] == ["0.weight", "0.bias"]


def test_a_shared_module_is_walked_under_each_name() -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert [name for name, _ in named_parameters(model)] == ["a.weight", "b.0.weight"]


def test_a_list_of_chunks_is_one_model() -> None:
    chunks = [nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.ModuleDict({"b": nn.Linear(1, 1)})]
    assert [name for name, _ in named_parameters(chunks)] == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_register_wrapper_teaches_a_class_and_its_subclasses() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.extra = nn.Parameter(torch.zeros(1))

    class Special(Outer):
        pass

    wrapped = Special(nn.Linear(1, 1, bias=False))
    assert [name for name, _ in named_parameters(wrapped)] == ["extra", "inner.weight"]
    frozen_opt.register_wrapper(Outer, "inner")
    assert [name for name, _ in named_parameters(wrapped)] == ["extra", "weight"]


def test_walking_leaves_the_model_alone() -> None:
    model = transformer()
    before = copy.deepcopy(dict(model.named_parameters()))
    list(named_parameters(model))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
