"""The decorator: what it keeps of what it decorates, where it looks, and the order of events."""

import abc
import asyncio
import copy
import dataclasses
import functools
import inspect
import pickle
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import frozen_opt
from frozen_opt import with_freezing
from frozen_opt.parameters import trainable_parameters
from tests.models import flags, moved, snapshot, train, transformer

GATES = ["*.mlp.gate.weight"]
CONFIG = {"trainer": {"policy": {"freeze_parameters": GATES}, "critic": {"optimizer_config": {}}}}


@with_freezing("policy")
def build(model: nn.Module, config: Any = CONFIG, *, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Builds."""
    return torch.optim.AdamW(trainable_parameters(model), lr=lr)


class Trainer:
    """Factories of every kind."""

    cfg = CONFIG

    def __init__(self, tag: int = 0) -> None:
        self.tag = tag

    @with_freezing("policy")
    def method(self, model: nn.Module) -> torch.optim.Optimizer:
        """Builds."""
        assert isinstance(self, Trainer)
        return torch.optim.AdamW(trainable_parameters(model))

    @with_freezing("policy")
    @classmethod
    def class_method(cls, model: nn.Module) -> torch.optim.Optimizer:
        """Builds."""
        assert cls is Trainer
        return torch.optim.AdamW(trainable_parameters(model))

    @classmethod
    @with_freezing("policy")
    def class_method_inside(cls, model: nn.Module) -> torch.optim.Optimizer:
        """Builds."""
        assert cls is Trainer
        return torch.optim.AdamW(trainable_parameters(model))

    @with_freezing("policy")
    @staticmethod
    def static_method(model: nn.Module, config: Any = CONFIG) -> torch.optim.Optimizer:
        """Builds."""
        return torch.optim.AdamW(trainable_parameters(model))

    @with_freezing("policy")
    async def coroutine(self, model: nn.Module) -> torch.optim.Optimizer:
        """Builds."""
        await asyncio.sleep(0)
        return torch.optim.AdamW(trainable_parameters(model))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trainer) and self.tag == other.tag

    __hash__ = None


@with_freezing("policy")
async def build_later(model: nn.Module, config: Any = CONFIG) -> torch.optim.Optimizer:
    """Builds."""
    await asyncio.sleep(0)
    return torch.optim.AdamW(trainable_parameters(model))


KINDS: dict[str, Callable[[], Any]] = {
    "function": lambda: build,
    "method": lambda: Trainer(3).method,
    "class method": lambda: Trainer.class_method,
    "class method, decorated inside": lambda: Trainer.class_method_inside,
    "static method": lambda: Trainer.static_method,
    "static method of an instance": lambda: Trainer().static_method,
    "coroutine": lambda: build_later,
    "coroutine method": lambda: Trainer(3).coroutine,
}


def result_of(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_factory_freezes(kind: str) -> None:
    model = transformer()
    optimizer = result_of(KINDS[kind]()(model))
    assert isinstance(optimizer, torch.optim.AdamW)
    before = snapshot(model)
    train(model, optimizer)
    assert set(before) - moved(model, before) == {"layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decorated_stays_what_it_was(kind: str) -> None:
    decorated = KINDS[kind]()
    bare = decorated.__wrapped__
    if hasattr(decorated, "__self__"):
        bare = MethodType(bare, decorated.__self__)
    assert inspect.signature(decorated) == inspect.signature(bare)
    assert decorated.__name__ == bare.__name__
    assert decorated.__qualname__ == bare.__qualname__
    assert decorated.__module__ == __name__
    assert decorated.__doc__ == "Builds."
    assert inspect.iscoroutinefunction(decorated) == ("coroutine" in kind)
    assert inspect.isfunction(decorated) == inspect.isfunction(bare)
    assert inspect.ismethod(decorated) == inspect.ismethod(bare)
    assert getattr(decorated, "__self__", None) == getattr(bare, "__self__", None)


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_gives_the_decorated_thing_back(kind: str) -> None:
    decorated = pickle.loads(pickle.dumps(KINDS[kind]()))
    assert decorated.__qualname__ == KINDS[kind]().__qualname__
    assert getattr(decorated, "__self__", None) == getattr(KINDS[kind](), "__self__", None)
    model = transformer()
    result_of(decorated(model))
    assert not model.layers[0].mlp.gate.weight.requires_grad


def test_methods_bind_as_before() -> None:
    model = transformer()
    Trainer.method(Trainer(), model)  # through the class
    assert not model.layers[0].mlp.gate.weight.requires_grad
    with pytest.raises(TypeError, match="missing a required argument"):
        Trainer().method()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_an_empty_list_changes_nothing(name: str, logs: list[Any]) -> None:
    def factory(model: nn.Module, config: Any) -> torch.optim.Optimizer:
        extra = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(model.parameters(), lr=1e-2, weight_decay=0.1, **extra)

    config = {"trainer": {"policy": {"freeze_parameters": []}}}
    with_it, without = transformer(seed=3), transformer(seed=3)
    decorated = with_freezing("policy")(factory)(with_it, config)
    bare = factory(without, config)
    train(with_it, decorated, steps=5)
    train(without, bare, steps=5)
    assert all(map(torch.equal, with_it.parameters(), without.parameters()))
    states = decorated.state_dict(), bare.state_dict()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for index, state in states[0]["state"].items():
        assert all(torch.equal(state[key], states[1]["state"][index][key]) for key in state)
    assert states[0]["state"], "there is state to compare"
    assert frozen_opt.metrics() == {"policy/frozen_parameter_count": 0, "policy/frozen_element_count": 0}
    assert [record["level"].name for record in logs] == ["DEBUG"]


class Counting(nn.Linear):
    """Counts how often its parts are looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("_modules", "_parameters", "named_parameters", "parameters", "modules", "children"):
            Counting.looks += 1
        return super().__getattribute__(name)


def test_an_empty_list_makes_no_pass_over_the_model() -> None:
    model = nn.Sequential(Counting(2, 2), Counting(2, 2))
    optimizer = torch.optim.SGD(model.parameters())

    def looks_for(patterns: list[str]) -> int:
        Counting.looks = 0
        with_freezing("policy", patterns=patterns)(lambda model: optimizer)(model)
        return Counting.looks

    assert looks_for([]) == 0
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError):
        looks_for(["0.*"])
    assert Counting.looks > 0


def test_the_factory_gets_a_frozen_model_and_its_result_comes_back_as_it_is() -> None:
    model, seen = transformer(), []

    class Result(tuple):
        __slots__ = ()

    @with_freezing("policy", patterns=GATES)
    def factory(model: nn.Module) -> Result:
        seen.append(flags(model))
        return results[0]

    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.ndim == 1])
    results = [Result((optimizer, None, "scheduler"))]
    assert factory(model) is results[0]
    assert [name for name, flag in seen[0].items() if not flag] == [
        "layers.0.mlp.gate.weight",
        "layers.1.mlp.gate.weight",
    ]


def failing(model: nn.Module) -> torch.optim.Optimizer:
    raise ConnectionError("the factory's own")


@pytest.mark.parametrize(
    ("factory", "patterns", "error"),
    [
        (failing, GATES, ConnectionError),
        (lambda model: torch.optim.SGD(model.parameters()), GATES,
         frozen_opt.FrozenParameterInOptimizerError),
        (lambda model: "no optimizer", GATES, frozen_opt.UnsupportedBackendError),
        (lambda model: torch.optim.SGD(copy.deepcopy(model).parameters()), GATES,
         frozen_opt.UnsupportedBackendError),
        (lambda model: None, [*GATES, "nowhere"], frozen_opt.UnmatchedPatternError),
        (lambda model: None, ["*"], frozen_opt.NothingTrainableError),
        (lambda model: None, "*.gate.weight", frozen_opt.FreezeConfigError),
    ],
)  # fmt: skip
def test_after_any_error_the_model_is_as_it_was(
    factory: Any, patterns: list[str], error: type[Exception]
) -> None:
    model = transformer()
    model.layers[1].mlp.gate.weight.requires_grad_(False)  # by somebody else, before
    before, weights = flags(model), snapshot(model)
    with pytest.raises(error):
        with_freezing("policy", patterns=patterns)(factory)(model)
    assert flags(model) == before
    assert not moved(model, weights)
    assert frozen_opt.report("policy").parameter_count == 0


def test_a_failing_coroutine_is_rolled_back_as_well() -> None:
    @with_freezing("policy", patterns=GATES)
    async def factory(model: nn.Module) -> None:
        await asyncio.sleep(0)
        raise ConnectionError

    model = transformer()
    with pytest.raises(ConnectionError):
        asyncio.run(factory(model))
    assert all(flags(model).values())


def test_a_cancelled_coroutine_is_rolled_back_as_well() -> None:
    @with_freezing("policy", patterns=GATES)
    async def factory(model: nn.Module) -> None:
        await asyncio.sleep(60)

    async def cancel(model: nn.Module) -> None:
        task = asyncio.create_task(factory(model))
        await asyncio.sleep(0.05)
        assert not model.layers[0].mlp.gate.weight.requires_grad
        task.cancel()
        await task

    model = transformer()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel(model))
    assert all(flags(model).values())


# Where the model and the config are found.


def optimizer_of(*arguments: Any, **more: Any) -> torch.optim.Optimizer:
    found = [value for value in (*arguments, *more.values()) if isinstance(value, nn.Module | list)]
    return torch.optim.SGD([parameter for model in found for parameter in trainable_parameters(model)])


def frozen_in(model: Any) -> int:
    return sum(not parameter.requires_grad for _, parameter in frozen_opt.named_parameters(model))


@pytest.mark.parametrize("name", ["model", "module", "anything"])
def test_the_model_is_found_by_usual_names_or_as_the_only_module(name: str) -> None:
    model = transformer()
    namespace: dict[str, Any] = {"optimizer_of": optimizer_of}
    exec(f"def factory(config, {name}): return optimizer_of({name})", namespace)
    with_freezing("policy")(namespace["factory"])(CONFIG, model)
    assert frozen_in(model) == 2


def test_a_list_of_chunks_is_a_model() -> None:
    chunks = [nn.ModuleDict({"a": transformer()}), nn.ModuleDict({"b": transformer()})]

    @with_freezing("policy", patterns=["b.*.gate.weight"])
    def factory(settings: object, model_chunks: list[nn.Module]) -> torch.optim.Optimizer:
        return optimizer_of(model_chunks)

    factory(None, chunks)
    assert frozen_in(chunks) == 2


def test_two_models_with_the_same_names_are_not_chunks() -> None:
    with pytest.raises(frozen_opt.FreezeConfigError, match="several parameters go by the same name"):
        with_freezing("policy", patterns=GATES)(lambda models: None)([transformer(), transformer()])


def test_the_model_and_the_config_can_be_named() -> None:
    model, other = transformer(), transformer()

    @with_freezing("policy", model="student", config="holder.inner.settings")
    def by_name(teacher: nn.Module, student: nn.Module, holder: Any) -> torch.optim.Optimizer:
        return optimizer_of(student)

    by_name(other, model, SimpleNamespace(inner={"settings": CONFIG}))
    assert (frozen_in(model), frozen_in(other)) == (2, 0)

    @with_freezing(
        "policy", model=lambda arguments: arguments["pair"][0], patterns=lambda arguments: GATES[:1]
    )
    def by_callable(pair: Any) -> torch.optim.Optimizer:
        return optimizer_of(pair[1], pair[0])

    by_callable((other, nn.Linear(1, 1)))
    assert frozen_in(other) == 2


def test_patterns_as_a_callable_get_the_bound_arguments() -> None:
    seen = {}

    def patterns(arguments: Any) -> list[str]:
        seen.update(arguments)
        return []

    class Strategy:
        @with_freezing("policy", patterns=patterns)
        def prepare(self, model: nn.Module, rate: float = 0.5, **more: Any) -> torch.optim.Optimizer:
            return optimizer_of(model)

    strategy, model = Strategy(), transformer()
    strategy.prepare(model, extra=7)
    assert seen == {"self": strategy, "model": model, "rate": 0.5, "extra": 7}


@pytest.mark.parametrize("attribute", ["cfg", "config"])
def test_the_config_of_self_is_found(attribute: str) -> None:
    class Strategy:
        @with_freezing("policy")
        def prepare(self, model: nn.Module) -> torch.optim.Optimizer:
            return optimizer_of(model)

    strategy, model = Strategy(), transformer()
    setattr(strategy, attribute, CONFIG)
    strategy.prepare(model)
    assert frozen_in(model) == 2


def test_self_may_be_the_model() -> None:
    class Lightning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformer()

        @with_freezing("policy", patterns=GATES)
        def configure_optimizers(self) -> dict[str, Any]:
            return {"optimizer": optimizer_of(self)}

    module = Lightning()
    module.configure_optimizers()
    assert frozen_in(module) == 2


@pytest.mark.parametrize(
    ("factory", "arguments", "options", "error", "says"),
    [
        (lambda model: None, ["qwen"], {"patterns": GATES},
         frozen_opt.UnsupportedBackendError, "the argument model is a builtins.str"),
        (lambda a: None, [3], {"patterns": GATES}, frozen_opt.FreezeConfigError, "no argument is the model"),
        (lambda a, b: None, [nn.Linear(1, 1), nn.Linear(1, 1)], {"patterns": GATES},
         frozen_opt.FreezeConfigError, r"several arguments might be the model \(a, b\)"),
        (lambda model: None, [nn.Linear(1, 1)], {}, frozen_opt.FreezeConfigError,
         r"looked for config, cfg, self\.cfg, self\.config among the arguments \(model\)"),
        (lambda model, config: None, [nn.Linear(1, 1), {"lr": 1}], {}, frozen_opt.FreezeConfigError,
         "no settings for role 'policy'"),
        (lambda model, config: None, [nn.Linear(1, 1), {}], {"config": "self.conf"},
         frozen_opt.FreezeConfigError, r"looked for self\.conf"),
        (lambda model: None, [nn.Linear(1, 1)], {"patterns": GATES, "model": "net"},
         frozen_opt.FreezeConfigError, "no such argument, only model"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_an_error_that_says_where_it_looked(
    factory: Any, arguments: list[Any], options: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        with_freezing("policy", **options)(factory)(*arguments)


def test_an_empty_list_needs_no_module() -> None:
    """A model that is no nn.Module is an error only once something is to be frozen."""
    assert with_freezing("policy", patterns=[])(lambda model: model)("anything") == "anything"


class Remote:
    """Whatever is asked of it fails, and none of it is a secret optimizer."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("the remote is down")


def test_an_empty_list_runs_no_code_of_what_the_factory_returned() -> None:
    config = OmegaConf.create({"trainer": {"policy": {}}, "data": "???"})

    @with_freezing("policy")
    def factory(model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters()), Remote(), config, [object() for _ in range(200_000)]

    assert len(factory(transformer(), config)) == 4


def test_a_model_that_is_no_module_is_not_exchanged_for_another_argument() -> None:
    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"the argument model is a builtins\.str"):
        with_freezing("policy", patterns=GATES)(lambda model, reward_model: None)("qwen", transformer())


def test_the_error_names_what_the_factory_returned() -> None:
    with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"returned a builtins\.NoneType"):
        with_freezing("policy", patterns=GATES)(lambda model: None)(transformer())


@pytest.mark.parametrize("arguments", [(transformer(),), (transformer(), CONFIG)])
def test_a_decorator_without_a_role_is_an_error(arguments: Any) -> None:
    @with_freezing
    def factory(model: nn.Module, config: Any = None) -> None: ...

    with pytest.raises(TypeError, match=r'write @with_freezing\("policy"\)'):
        factory(*arguments)


# Where trainers keep things.


class Trainer24:
    """Keeps its model, its config and its optimizer to itself."""

    def __init__(self, role: str = "policy", patterns: list[str] = GATES) -> None:
        self.role, self.cfg = role, {role: {"freeze_parameters": patterns}}
        self.model = transformer()
        self.optimizer: Any = None

    @with_freezing("self.role")
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        return optimizer_of(model or self.model)

    @with_freezing("self.role")
    def setup(self) -> None:
        self.optimizer = optimizer_of(self.model)

    @with_freezing("self.role")
    def setup_several(self) -> None:
        self.optimizers = [optimizer_of(self.model)]

    @with_freezing("self.role")
    def forget(self) -> None:
        self.optimizer = optimizer_of(nn.Linear(1, 1))
        del self.optimizer

    @with_freezing("self.role")
    def naive(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters())

    @with_freezing("self.role")
    def inference_only(self) -> tuple[Any, None, None]:
        return self.model, None, None

    @with_freezing("self.role")
    def inference_only_in_place(self) -> None:
        self.optimizer = None

    @with_freezing("self.role")
    def strategy(self, *models_or_pairs: Any) -> Any:
        return [(model, optimizer_of(model), None) for model, *_ in models_or_pairs]


@pytest.mark.parametrize("attribute", ["model", "module", "models"])
def test_case_24_the_model_of_self(attribute: str) -> None:
    trainer = Trainer24()
    model = trainer.__dict__.pop("model")
    setattr(trainer, attribute, [model] if attribute == "models" else model)
    with_freezing("policy")(_of_self)(trainer)
    assert frozen_in(model) == 2


def _of_self(self: Any) -> torch.optim.Optimizer:
    return optimizer_of(*[v for v in vars(self).values() if isinstance(v, nn.Module | list)])


@pytest.mark.parametrize("call", ["create_optimizer", "setup", "setup_several"])
def test_case_24_methods_that_keep_model_and_optimizer_in_self(call: str) -> None:
    trainer = Trainer24()
    getattr(trainer, call)()
    assert frozen_in(trainer.model) == 2
    other = transformer()
    trainer.create_optimizer(other)
    assert frozen_in(other) == 2


def test_case_24_the_optimizer_in_self_is_proved_like_any() -> None:
    trainer = Trainer24()
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError):
        trainer.naive()
    with pytest.raises(frozen_opt.UnsupportedBackendError, match="finds no optimizer that it can check"):
        trainer.forget()
    assert frozen_in(trainer.model) == 0


@pytest.mark.parametrize("call", ["inference_only", "inference_only_in_place"])
def test_case_24_a_factory_that_builds_no_optimizer(call: str, logs: list[Any]) -> None:
    trainer = Trainer24()
    getattr(trainer, call)()
    assert frozen_in(trainer.model) == 2
    assert frozen_opt.metrics("policy")["frozen_parameter_count"] == 2
    assert not frozen_opt.report("policy").has_optimizer
    assert logs[-1]["message"].endswith("; the factory built no optimizer")


def test_case_27_the_only_module_in_a_tuple_of_arguments() -> None:
    trainer, model = Trainer24(), transformer()
    trainer.strategy((model, None, None))
    assert (frozen_in(model), frozen_in(trainer.model)) == (2, 0)
    with pytest.raises(frozen_opt.FreezeConfigError, match="several arguments might be the model"):
        trainer.strategy((model, None, None), (transformer(), None, None))


def test_case_27_none_as_the_list_is_an_empty_list() -> None:
    model = transformer()
    optimizer = with_freezing("policy", patterns=None)(optimizer_of)(model)
    assert optimizer is not None
    assert frozen_in(model) == 0


def test_case_25_one_class_serves_several_roles() -> None:
    actor, critic = Trainer24("actor"), Trainer24("critic", ["head.weight"])
    actor.setup()
    critic.setup()
    assert frozen_opt.metrics("actor")["frozen_parameter_count"] == 2
    assert frozen_opt.metrics("critic")["frozen_parameter_count"] == 1
    assert list(frozen_opt.metrics())[::2] == [
        "actor/frozen_parameter_count",
        "critic/frozen_parameter_count",
    ]

    @with_freezing(lambda call: call["name"], patterns=GATES)
    def by_callable(model: nn.Module, name: Any) -> torch.optim.Optimizer:
        return optimizer_of(model)

    by_callable(transformer(), "reference")
    assert frozen_opt.report("reference").parameter_count == 2
    for name in (None, "", 3):
        with pytest.raises(frozen_opt.FreezeConfigError, match="the role of this call is"):
            by_callable(transformer(), name)


def test_case_25_a_path_to_no_role_is_an_error() -> None:
    with pytest.raises(
        frozen_opt.FreezeConfigError, match=r"with_freezing\('self\.rule'\): the role of this call"
    ):
        with_freezing("self.rule", patterns=GATES)(Trainer24().setup)()


class Container(torch.optim.Optimizer):
    """An optimizer of optimizers, as torchtitan's: its constructor is the factory."""

    @with_freezing("policy", patterns=GATES)
    def __init__(self, model: nn.Module) -> None:
        super().__init__(trainable_parameters(model), {})
        self.parts = [torch.optim.SGD(trainable_parameters(model))]


class Careless(Container):
    @with_freezing("policy", patterns=GATES)
    def __init__(self, model: nn.Module) -> None:
        torch.optim.Optimizer.__init__(self, trainable_parameters(model), {})
        self.parts = [torch.optim.SGD(model.parameters())]


def test_case_24_a_constructor_is_a_factory_of_self() -> None:
    model = transformer()
    assert isinstance(Container(model), Container)
    assert frozen_in(model) == 2
    frozen_opt.reset()
    model = transformer()
    with pytest.raises(frozen_opt.FrozenParameterInOptimizerError):
        Careless(model)
    assert frozen_in(model) == 0


class Called:
    """A callable object, with a config of its own."""

    cfg = CONFIG

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model)


def sgd_of(model: nn.Module, config: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable_parameters(model), lr=lr)


def test_case_24_partials_and_callable_objects() -> None:
    models = [transformer() for _ in range(3)]
    with_freezing("policy")(functools.partial(sgd_of, config=CONFIG))(models[0])
    with_freezing("policy")(functools.partial(functools.partial(sgd_of, models[1]), lr=1.0))(CONFIG)
    decorated = with_freezing("policy")(Called())
    assert inspect.signature(decorated) == inspect.signature(Called())
    assert "cfg" not in vars(decorated)
    decorated(models[2])
    assert [frozen_in(model) for model in models] == [2, 2, 2]


class Abstract(abc.ABC):
    cfg = CONFIG

    @abc.abstractmethod
    @with_freezing("policy")
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model)


class Concrete(Abstract):
    @with_freezing("policy")
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return super().build(model)


def test_case_24_abstract_and_nested() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # type: ignore[abstract]
    model = transformer()
    Concrete().build(model)
    assert frozen_in(model) == 2


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    cfg: Any = dataclasses.field(default_factory=lambda: CONFIG)

    @with_freezing("policy")
    def build(this, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model)


def test_case_24_slots_and_another_name_for_self() -> None:
    model = transformer()
    Slotted().build(model)
    assert frozen_in(model) == 2


def test_an_empty_list_needs_no_model_even_where_the_role_has_frozen_another() -> None:
    with_freezing("policy", patterns=GATES)(optimizer_of)(model := transformer())
    assert with_freezing("policy", patterns=[])(lambda model: model)("anything") == "anything"
    assert frozen_in(model) == 2
