"""The list is the state: what leaves it thaws, whatever was called before; a failed call changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import frozen_opt
from frozen_opt import with_freezing
from tests.models import flags, moved, snapshot, train, transformer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(frozen_opt.trainable_parameters(model), lr=0.1, momentum=0.9, weight_decay=0.1)


def call(model: nn.Module, patterns: list[str], role: str = "policy") -> Any:
    return with_freezing(role, patterns=patterns)(sgd)(model)


def by_hook(model: nn.Module, patterns: list[str]) -> Any:
    frozen_opt.freezing_hook("policy", patterns)(model)
    return sgd(model)


def at_once(model: nn.Module, patterns: list[str]) -> Any:
    frozen_opt.freeze_parameters(model, patterns, role="policy")
    return sgd(model)


def by_plan(model: nn.Module, patterns: list[str]) -> Any:
    frozen_opt.plan_freezing(model, patterns, role="policy").apply()
    return sgd(model)


def frozen(model: nn.Module) -> set[str]:
    return {name for name, flag in flags(model).items() if not flag}


def held(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[str]:
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name for name, parameter in frozen_opt.named_parameters(model) if id(parameter) in ids}


GATES = {"layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"}


@pytest.mark.parametrize("freeze", [call, by_hook, at_once, by_plan])
def test_case_33_what_leaves_the_list_trains_again(freeze: Callable[..., Any], logs: list[Any]) -> None:
    model = transformer()
    model.head.weight.requires_grad_(False)  # by hand: no list thaws it
    everything = set(flags(model))
    for patterns, expected in (
        (["*.gate.weight", "head.weight", "embedding.weight"], GATES | {"embedding.weight"}),
        (["*.gate.weight"], GATES),
        (["layers.1.mlp.*"], {n for n in everything if n.startswith("layers.1.mlp.")}),
        ([], set()),
    ):
        optimizer = freeze(model, patterns)
        assert frozen(model) == expected | {"head.weight"}
        assert held(optimizer, model) == everything - expected - {"head.weight"}
        report = frozen_opt.report("policy")
        assert set(report.names) - {"head.weight"} == expected
        assert frozen_opt.metrics("policy")["frozen_parameter_count"] == report.parameter_count
        before = snapshot(model)
        train(model, optimizer, steps=1)
        assert moved(model, before) == everything - expected - {"head.weight"}
    messages = [record["message"] for record in logs if record["level"].name == "INFO"]
    assert [message.partition("thawed ")[2] for message in messages] == [
        "",
        "1 parameter: embedding.weight",
        "1 parameter: layers.0.mlp.gate.weight",
        "3 parameters: layers.1.mlp.gate.weight, layers.1.mlp.experts.{0..1}.weight; nothing is frozen any "
        "more",
    ]


def test_a_plan_says_what_it_would_thaw_and_thaws_nothing() -> None:
    model = transformer()
    call(model, ["*.gate.weight", "head.weight"])
    plan = frozen_opt.plan_freezing(model, ["head.weight"], role="policy")
    assert set(plan.thawed) == GATES
    assert frozen(model) == GATES | {"head.weight"}
    assert frozen_opt.report("policy").parameter_count == 3
    assert frozen_opt.plan_freezing(transformer(), ["head.weight"], role="policy").thawed == ()


def test_what_another_role_froze_stays() -> None:
    model = transformer()
    call(model, ["*.gate.weight"], "policy")
    call(model, ["layers.0.mlp.*"], "critic")
    call(model, [], "policy")
    assert frozen(model) == {n for n in flags(model) if n.startswith("layers.0.mlp.")}
    call(model, [], "critic")
    assert frozen(model) == set()


def test_a_failed_call_leaves_the_state_of_the_call_before() -> None:
    model = transformer()
    call(model, ["*.gate.weight"])
    report = frozen_opt.report("policy")

    def failing(model: nn.Module) -> Any:
        assert frozen(model) == {"head.weight"}
        raise ConnectionError

    with pytest.raises(ConnectionError):
        with_freezing("policy", patterns=["head.weight"])(failing)(model)
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError):
        with_freezing("policy", patterns=["head.weight"])(lambda model: torch.optim.SGD(model.parameters()))(
            model
        )
    with pytest.raises(frozen_opt.UnmatchedPatternError):
        call(model, ["nowhere"])
    assert frozen(model) == GATES
    assert frozen_opt.report("policy") is report
    call(model, [])
    assert frozen(model) == set()


def test_a_thawed_parameter_still_needs_a_gradient_to_count() -> None:
    """Integers can't require one: what never could is not thawed into an error."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["a"].register_parameter("ids", nn.Parameter(torch.arange(3), requires_grad=False))
    call(model, ["a.*"])
    call(model, [])
    assert frozen(model) == {"a.ids"}


def test_tied_parameters_thaw_as_one() -> None:
    model = transformer(tied=True)
    call(model, ["head.weight", "*.gate.weight"])
    call(model, ["*.gate.weight"])
    assert model.head.weight is model.embedding.weight
    assert frozen(model) == GATES


# Random lists, for two roles that share modules: always as on a model that was built afresh with these lists.

PARTS = ["trunk.0.*", "trunk.1.weight", "trunk.*.bias", "own.*", "!*.bias", "*", "!own.*", "nowhere"]
LISTS = st.lists(st.sampled_from(PARTS), max_size=3, unique=True)


class Pair:
    """A policy and a critic on one trunk."""

    def __init__(self, by_hand: list[bool]) -> None:
        self.trunk = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for parameter, flag in zip(self.trunk.parameters(), by_hand, strict=True):
            parameter.requires_grad_(flag)
        self.models = {
            role: nn.ModuleDict({"trunk": self.trunk, "own": nn.Linear(2, 2)})
            for role in ("policy", "critic")
        }
        self.optimizers: dict[str, Any] = {}

    def flags(self) -> dict[str, dict[str, bool]]:
        return {role: flags(model) for role, model in self.models.items()}


def attempt(pair: Pair, role: str, patterns: list[str], fails: bool) -> bool:
    """Whether a call succeeds; the optimizers of both roles are those of the last calls that did."""

    def factory(model: nn.Module) -> Any:
        if fails:
            raise ConnectionError
        return sgd(model)

    try:
        pair.optimizers[role] = with_freezing(role, patterns=patterns)(factory)(pair.models[role])
    except (frozen_opt.FreezingError, ConnectionError, ValueError):
        return False  # ValueError: torch's, of an empty list of parameters
    return True


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.tuples(st.sampled_from(["policy", "critic"]), LISTS, st.booleans()), min_size=1, max_size=6),
)
def test_after_any_calls_all_is_as_on_a_model_built_afresh(
    by_hand: list[bool], calls: list[tuple[str, list[str], bool]]
) -> None:
    frozen_opt.reset()
    pair, lists = Pair(by_hand), {role: list[str]() for role in ("policy", "critic")}
    for role, patterns, fails in calls:
        before = pair.flags(), {each: frozen_opt.report(each) for each in lists}
        pair.optimizers.pop(role, None)  # a trainer drops the optimizer that it replaces
        if attempt(pair, role, patterns, fails):
            lists[role] = patterns
        else:
            assert (pair.flags(), {each: frozen_opt.report(each) for each in lists}) == before
            continue
        reports = {each: frozen_opt.report(each) for each in lists}
        now, fresh = pair.flags(), Pair(by_hand)
        expected = {
            each: frozen_opt.plan_freezing(m, lists[each], role="afresh") for each, m in fresh.models.items()
        }
        for each, plan in expected.items():
            assert (reports[each].names, reports[each].element_count) == (plan.names, plan.element_count)
            for name in plan.names:
                dict(frozen_opt.named_parameters(fresh.models[each]))[name].requires_grad_(False)
        assert now == fresh.flags()
        optimizer = pair.optimizers[role]
        assert held(optimizer, pair.models[role]) == {n for n, flag in now[role].items() if flag}
        train_pair(pair, role)
        names = {id(p): n for n, p in frozen_opt.named_parameters(pair.models[role])}
        assert {names[id(key)] for key in optimizer.state} <= {n for n, flag in now[role].items() if flag}
    frozen_opt.reset()


def train_pair(pair: Pair, role: str) -> None:
    model = pair.models[role]
    model["own"](pair.trunk(torch.ones(1, 2))).sum().backward()
    pair.optimizers[role].step()
    pair.optimizers[role].zero_grad()
