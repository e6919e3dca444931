"""The proof: no optimizer holds a frozen parameter, whatever the optimizer and however it was built."""

import gc
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_optimizer
from torch import nn

import frozen_opt
from frozen_opt import FrozenParameterInOptimizerError, with_freezing
from frozen_opt.backends.optimizer_search import find_optimizers
from frozen_opt.parameters import trainable_named_parameters, trainable_parameters
from tests.models import flags, moved, snapshot, train, transformer

PATTERNS = ["*.mlp.gate.weight", "embedding.weight"]
FROZEN = {"embedding.weight", "layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"}


def optimizer_classes(package: Any) -> Iterator[type[torch.optim.Optimizer]]:
    for name in sorted(dir(package)):
        kind = getattr(package, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            yield kind


# SparseAdam wants sparse gradients, Muon takes matrices alone (see HybridMuon), Lookahead wraps another.
MUON = getattr(torch.optim, "Muon", None)  # torch has it since 2.9
NOT_DENSE = {torch.optim.Optimizer, torch.optim.SparseAdam, MUON, torch_optimizer.Lookahead}
DENSE = [
    kind
    for package in (torch.optim, torch_optimizer)
    for kind in optimizer_classes(package)
    if kind not in NOT_DENSE
]


def ids(kinds: list[type]) -> list[str]:
    return [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in kinds]


def strong_settings(kind: type) -> dict[str, Any]:
    """Weight decay and momentum wherever the class has them: what moves a tensor without a gradient."""
    wanted = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
    taken = inspect.signature(kind).parameters
    return {key: value for key, value in wanted.items() if key in taken}


def test_all_optimizers_are_there() -> None:
    assert len(DENSE) > 40


@pytest.mark.parametrize("kind", DENSE, ids=ids(DENSE))
def test_frozen_tensors_hold_no_state_and_never_move(kind: type[torch.optim.Optimizer]) -> None:
    model = transformer()

    @with_freezing("policy", patterns=PATTERNS)
    def factory(model: nn.Module) -> torch.optim.Optimizer:
        return kind(trainable_parameters(model), **strong_settings(kind))

    before = snapshot(model)
    optimizer = factory(model)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert not any(parameter in optimizer.state for parameter in frozen)  # case 19: Adagrad's is there now
    train(model, optimizer)
    assert set(before) - moved(model, before) == FROZEN
    assert not any(parameter in optimizer.state for parameter in frozen)
    assert all(parameter.grad is None for parameter in frozen)
    assert optimizer.state, "there is state at all"


@pytest.mark.parametrize("kind", DENSE, ids=ids(DENSE))
def test_a_naive_factory_is_rejected_with_the_names_and_the_fix(kind: type[torch.optim.Optimizer]) -> None:
    model = transformer()

    @with_freezing("policy", patterns=PATTERNS)
    def factory(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), **strong_settings(kind))

    before = snapshot(model)
    with pytest.raises(FrozenParameterInOptimizerError) as caught:
        factory(model)
    assert all(name in str(caught.value) for name in [*FROZEN, "trainable_parameters(model)", "'policy'"])
    assert all(flags(model).values())
    assert not moved(model, before)


class Composite(torch.optim.Optimizer):
    """An optimizer made of optimizers that shows no parameters of its own."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts
        self.param_groups: list[Any] = []


@dataclass
class State:
    optimizer: Any
    step: int = 0


Pair = namedtuple("Pair", ["optimizer", "scheduler"])


class SlotHolder:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def halves(parameters: list[Any]) -> list[torch.optim.Optimizer]:
    return [sgd(parameters[::2]), sgd(parameters[1::2])]


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


@dataclass(slots=True)
class Slotted:
    optimizer: Any


class Duck:
    """Shows the groups of an optimizer that it is not."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups


class Proxy:
    def __init__(self, optimizer: Any) -> None:
        self.wrapped = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def beside(hidden: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    """A first optimizer in plain sight, and a second one hidden."""
    return lambda ps: (sgd(ps[:1]), hidden(sgd(ps[1:])))


SHAPES: dict[str, Callable[[list[Any]], Any]] = {
    "a dataclass with slots": beside(Slotted),
    "nested dataclasses": beside(lambda optimizer: State(State(optimizer))),
    "a namespace": beside(lambda optimizer: SimpleNamespace(muon=optimizer)),
    "a dict of lists in a dataclass": beside(lambda optimizer: State({"x": [optimizer]})),
    "an optimizer of optimizers, deep": beside(lambda optimizer: Composite({"others": [[optimizer]]})),
    "an optimizer of optimizers, by an object": beside(
        lambda optimizer: Composite(SimpleNamespace(opt=optimizer))
    ),
    "a duck": beside(lambda optimizer: {"critic": Duck(optimizer)}),
    "a proxy": beside(Proxy),
    "one group": sgd,
    "several groups, one empty": lambda ps: sgd(
        [{"params": ps[:2]}, {"params": [], "lr": 1.0}, {"params": ps[2:]}]
    ),
    "a group a parameter": lambda ps: sgd([{"params": [p]} for p in ps]),
    "(optimizer, scheduler)": lambda ps: (optimizer := sgd(ps), scheduler_of(optimizer)),
    "the scheduler alone": lambda ps: scheduler_of(sgd(ps)),
    "a named tuple": lambda ps: Pair(sgd(ps), None),
    "a list": halves,
    "a dict": lambda ps: dict(zip("ab", halves(ps), strict=True)),
    "a dict of lists": lambda ps: {"all": halves(ps), "other": 3},
    "a dataclass": lambda ps: State(sgd(ps)),
    "an object with an optimizer": lambda ps: SlotHolder(sgd(ps)),
    "an optimizer of optimizers, as a list": lambda ps: Composite(halves(ps)),
    "an optimizer of optimizers, as a dict": lambda ps: Composite(dict(enumerate(halves(ps)))),
    "an optimizer of optimizers, nested": lambda ps: Composite([Composite(halves(ps))]),
    "Lookahead": lambda ps: torch_optimizer.Lookahead(sgd(ps)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_proof_sees_through_every_shape(shape: str) -> None:
    model = transformer()
    every = len(list(model.parameters()))
    held = {id(p) for _, ps in find_optimizers(SHAPES[shape](list(model.parameters()))) for p in ps}
    assert len(held) == every

    decorate = with_freezing("policy", patterns=PATTERNS)
    with pytest.raises(FrozenParameterInOptimizerError):
        decorate(lambda model: SHAPES[shape](list(model.parameters())))(model)
    decorate(lambda model: SHAPES[shape](trainable_parameters(model)))(model)
    assert {name for name, flag in flags(model).items() if not flag} == FROZEN


def test_optimizers_built_from_names_and_parameters() -> None:
    model = transformer()
    decorate = with_freezing("policy", patterns=PATTERNS)
    with pytest.raises(FrozenParameterInOptimizerError):
        decorate(lambda model: sgd(list(model.named_parameters())))(model)
    optimizer = decorate(lambda model: sgd(trainable_named_parameters(model)))(model)
    assert not FROZEN & set(optimizer.param_groups[0]["param_names"])


def test_case_01_frozen_after_the_optimizer_keeps_moving_and_frozen_before_it_does_not() -> None:
    late = transformer()
    optimizer = torch.optim.AdamW(late.parameters(), weight_decay=0.1)
    train(late, optimizer, steps=1)
    late.embedding.weight.requires_grad_(False)
    late.embedding.weight.grad.zero_()
    before = snapshot(late)
    optimizer.step()
    assert "embedding.weight" in moved(late, before), "the fault that freezing before prevents"

    model = transformer()
    optimizer = with_freezing("policy", patterns=["embedding.weight"])(
        lambda model: torch.optim.AdamW(trainable_parameters(model), weight_decay=0.1)
    )(model)
    before = snapshot(model)
    train(model, optimizer)
    assert set(before) - moved(model, before) == {"embedding.weight"}


class MasterWeights(torch.optim.Optimizer):
    """Steps fp32 copies of what is bf16, and the rest itself, as mixed-precision optimizers do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        masters = [p.detach().float() if p.dtype == torch.bfloat16 else p for p in parameters]
        super().__init__(masters, {})


def test_copies_of_a_frozen_parameter_are_caught_by_value() -> None:
    model = transformer()
    model.embedding.bfloat16()
    decorate = with_freezing("policy", patterns=PATTERNS)
    rest = [parameter for name, parameter in model.named_parameters() if name not in FROZEN]
    with pytest.raises(FrozenParameterInOptimizerError, match=r"copies of embedding\.weight"):
        decorate(lambda model: MasterWeights([model.embedding.weight, *rest]))(model)
    assert all(flags(model).values())
    outside = nn.Parameter(torch.zeros(11, 8))  # of the embedding's shape, and no copy
    decorate(lambda model: MasterWeights([outside, *rest]))(model)


@pytest.mark.parametrize("tie", ["the same memory", "a part of it"])
def test_ties_by_memory_are_caught(tie: str) -> None:
    model = transformer()
    if tie == "the same memory":
        model.head.weight.data = model.embedding.weight.data
    else:
        model.head.weight = nn.Parameter(model.embedding.weight.data[3:5])
    decorated = with_freezing("policy", patterns=PATTERNS)(lambda model: sgd(trainable_parameters(model)))
    with pytest.raises(FrozenParameterInOptimizerError, match=r"in the memory of embedding\.weight"):
        decorated(model)
    assert all(flags(model).values())


def test_neighbours_in_one_storage_are_no_tie() -> None:
    model = transformer()
    flat = torch.randn(2 * 88)
    model.embedding.weight.data, model.head.weight.data = flat[:88].view(11, 8), flat[88:].view(11, 8)
    with_freezing("policy", patterns=PATTERNS)(lambda model: sgd(trainable_parameters(model)))(model)


def test_what_a_role_froze_of_one_model_its_optimizer_of_another_must_not_hold() -> None:
    model, other = transformer(), transformer()
    frozen_opt.freezing_hook("policy", PATTERNS)(model)
    decorate = with_freezing("policy", patterns=[])
    with pytest.raises(FrozenParameterInOptimizerError, match=r"which this role froze before"):
        decorate(lambda other: sgd([*model.parameters(), *other.parameters()]))(other)
    decorate(lambda other: sgd(trainable_parameters([model, other])))(other)
    assert frozen_opt.metrics()["policy/frozen_parameter_count"] == 3  # of the first model, as before


def test_a_role_may_freeze_several_models_and_forgets_none() -> None:
    first, second = transformer(), transformer()
    for model in (first, second):
        Roles.build_well("policy", model, PATTERNS)
    with pytest.raises(FrozenParameterInOptimizerError, match="which role 'policy' has frozen"):
        Roles.build("critic", first, [])


def test_gradients_of_an_earlier_backward_are_dropped() -> None:
    model = transformer()
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.embedding.weight.grad is not None
    frozen_opt.freeze_parameters(model, ["embedding.weight"], role="policy")
    assert model.embedding.weight.grad is None
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("held", ["by the optimizer", "by nobody"])
def test_case_13_a_parameter_registered_anew_in_the_factory_is_caught_by_name(held: str) -> None:
    model = transformer()

    @with_freezing("policy", patterns=PATTERNS)
    def factory(model: nn.Module) -> torch.optim.Optimizer:
        fresh = nn.Parameter(model.embedding.weight.detach().clone())
        optimizer = sgd(trainable_parameters(model))
        model.embedding.weight = fresh
        if held == "by the optimizer":
            optimizer.add_param_group({"params": [fresh]})
        return optimizer

    with pytest.raises(FrozenParameterInOptimizerError, match=r"embedding\.weight"):
        factory(model)
    assert all(flags(model).values())


def test_a_parameter_registered_anew_and_frozen_is_fine_and_put_back_after_an_error() -> None:
    def factory(model: nn.Module, fail: bool) -> torch.optim.Optimizer:
        model.embedding.weight = nn.Parameter(model.embedding.weight.detach().clone(), requires_grad=False)
        if fail:
            raise ConnectionError
        return sgd(trainable_parameters(model))

    model = transformer()
    decorated = with_freezing("policy", patterns=PATTERNS)(factory)
    with pytest.raises(ConnectionError):
        decorated(model, fail=True)
    assert all(flags(model).values())
    decorated(model, fail=False)
    assert not model.embedding.weight.requires_grad


class Untying:
    """Factories that load a state as FSDP2 loaders do: each name gets a parameter of its own."""

    @staticmethod
    def load(model: nn.Module) -> None:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    @classmethod
    def and_frozen(cls, model: nn.Module) -> torch.optim.Optimizer:
        cls.load(model)
        return sgd(trainable_parameters(model))

    @classmethod
    def and_thawed(cls, model: nn.Module) -> torch.optim.Optimizer:
        cls.load(model)
        model.head.weight.requires_grad_(True)
        return sgd(trainable_parameters(model))


@pytest.mark.parametrize("pattern", ["head.weight", "embedding.weight"])
def test_case_29_both_halves_of_a_tie_that_the_factory_broke_stay_frozen(
    pattern: str, logs: list[Any]
) -> None:
    model = transformer(tied=True)
    decorate = with_freezing("policy", patterns=[pattern])
    optimizer = decorate(Untying.and_frozen)(model)
    assert model.head.weight is not model.embedding.weight
    report = frozen_opt.report("policy")
    assert report.names == ("embedding.weight", "head.weight")
    assert (report.element_count, report.ties) == (2 * 88, {})
    assert report.untied == {"head.weight": "embedding.weight"}
    assert "head.weight was tied to embedding.weight, and the factory broke the tie" in logs[-1]["message"]
    before = snapshot(model)
    train(model, optimizer)
    assert set(before) - moved(model, before) == set(report.names)
    report.verify(model, optimizer)
    decorate(lambda model: optimizer)(model)  # again: there is no tie any more
    assert frozen_opt.report("policy").names == (pattern,)


def test_case_29_a_half_that_comes_up_trainable_is_caught() -> None:
    model = transformer(tied=True)
    with pytest.raises(FrozenParameterInOptimizerError, match=r"holds 1 frozen parameters: head\.weight"):
        with_freezing("policy", patterns=["embedding.weight"])(Untying.and_thawed)(model)
    assert all(flags(model).values())


def test_case_16_empty_groups_are_accepted_and_frozen_ones_caught() -> None:
    model = transformer()
    decorate = with_freezing("policy", patterns=PATTERNS)
    groups = lambda model, keep: [  # noqa: E731
        {"params": [p] if keep(p) else []} for p in model.parameters()
    ]
    with pytest.raises(FrozenParameterInOptimizerError):
        decorate(lambda model: torch.optim.AdamW(groups(model, lambda p: True)))(model)
    optimizer = decorate(lambda model: torch.optim.AdamW(groups(model, lambda p: p.requires_grad)))(model)
    assert sum(not group["params"] for group in optimizer.param_groups) == 3
    before = snapshot(model)
    train(model, optimizer)
    assert set(before) - moved(model, before) == FROZEN


def test_case_19_adagrad_has_no_state_for_frozen_tensors_even_before_a_step() -> None:
    model = transformer()
    optimizer = with_freezing("policy", patterns=PATTERNS)(
        lambda model: torch.optim.Adagrad(trainable_parameters(model))
    )(model)
    assert len(optimizer.state) == len(trainable_parameters(model)) > 0
    assert not any(p in optimizer.state for p in model.parameters() if not p.requires_grad)


class Roles:
    """A policy and a critic on one body."""

    def __init__(self) -> None:
        self.body = transformer()
        self.policy = nn.ModuleDict({"body": self.body, "head": nn.Linear(11, 2)})
        self.critic = nn.ModuleDict({"body": self.body, "value": nn.Linear(11, 1)})

    @staticmethod
    def build(role: str, model: nn.Module, patterns: list[str]) -> torch.optim.Optimizer:
        return with_freezing(role, patterns=patterns)(lambda model: sgd(model.parameters()))(model)

    @staticmethod
    def build_well(role: str, model: nn.Module, patterns: list[str]) -> torch.optim.Optimizer:
        return with_freezing(role, patterns=patterns)(lambda model: sgd(trainable_parameters(model)))(model)


@pytest.mark.parametrize("critics_own", [[], ["value.bias"]])
def test_case_20_what_the_policy_froze_the_critic_must_not_hold(critics_own: list[str]) -> None:
    roles = Roles()
    roles.build_well("policy", roles.policy, ["body.*"])
    naive = with_freezing("critic", patterns=critics_own)(
        lambda model: sgd([p for n, p in model.named_parameters() if n not in critics_own])
    )
    with pytest.raises(
        FrozenParameterInOptimizerError, match=r"'critic' holds body\.\S+, which role 'policy'"
    ):
        naive(roles.critic)


def test_case_20_what_the_critic_holds_already_the_policy_cannot_freeze() -> None:
    roles = Roles()
    critic = roles.build_well("critic", roles.critic, [])
    with pytest.raises(FrozenParameterInOptimizerError, match="the optimizer of role 'critic' holds body"):
        roles.build_well("policy", roles.policy, ["body.*"])
    assert all(flags(roles.policy).values())
    del critic  # once that optimizer is gone, nothing stands against it
    gc.collect()  # the error above still holds its frames
    roles.build_well("policy", roles.policy, ["body.*"])


def test_case_20_each_role_freezes_its_own() -> None:
    policy, critic = transformer(), transformer()
    Roles.build_well("policy", policy, ["embedding.weight"])
    Roles.build_well("critic", critic, ["head.weight"])
    assert [name for name, flag in flags(policy).items() if not flag] == ["embedding.weight"]
    assert [name for name, flag in flags(critic).items() if not flag] == ["head.weight"]
    assert frozen_opt.metrics() == {
        "policy/frozen_parameter_count": 1,
        "policy/frozen_element_count": 88,
        "critic/frozen_parameter_count": 1,
        "critic/frozen_element_count": 88,
    }
