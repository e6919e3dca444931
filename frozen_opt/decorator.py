"""`with_freezing`: freeze before a factory builds the optimizer, and prove it afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import wrapt

from frozen_opt import ranks
from frozen_opt.arguments import bind, find_model, find_patterns
from frozen_opt.backends import find_optimizers
from frozen_opt.exclusion import prove_apart
from frozen_opt.plan import freeze_parameters, make_plan
from frozen_opt.report import FreezeReport, record
from frozen_opt.selection import NameMap

Factory = TypeVar("Factory", bound=Callable[..., Any])
Model = TypeVar("Model")


def with_freezing(
    role: str,
    *,
    patterns: Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str] | None] | None = None,
    config: str | None = None,
    model: str | Callable[[Mapping[str, Any]], Any] | None = None,
    name_map: NameMap = None,
    group: ranks.Group = None,
) -> Callable[[Factory], Factory]:
    """Decorate an optimizer factory: it gets the model with the role's parameters frozen already.

    Works on functions, methods, class methods, static methods and coroutines; signature, name, docstring,
    binding and pickling stay. If anything fails, the model's requires_grad flags are put back.

        @with_freezing("policy")
        def build_optimizer(model, config): ...

    Args:
        role: `policy`, `critic`, or any other name; names the config's node, the metrics and the errors.
        patterns: The list itself, or a callable that gets the call's bound arguments and returns it. By
            default the config says: `trainer.<role>.freeze_parameters`.
        config: The argument that holds the config, or a dotted path such as `self.cfg`. By default
            `config`, `cfg`, `self.cfg`, `self.config`, the first that is there.
        model: The argument that holds the model (a module, or a list of chunks), or a callable of the
            bound arguments. By default `model`, `module`, `models`, `model_chunks`, then the only
            argument that is one.
        name_map: More names for the parameters; see `plan_freezing`.
        group: The ranks that agree; all by default. Where one rank's list is not empty, no rank's may be:
            an empty list takes part in nothing.

    Raises:
        FreezingError: On the call, as one of its subclasses; see `plan_freezing`, and:
        FrozenParameterInOptimizerError: The optimizer holds a frozen parameter.
        UnsupportedBackendError: There is no optimizer in what the factory returned, or it can't be checked.
    """
    if not isinstance(role, str):
        raise TypeError('with_freezing takes a role: write @with_freezing("policy")')

    @contextmanager
    def freezing(factory: Any, instance: Any, args: Any, kwargs: Any) -> Iterator[_Call]:
        arguments = bind(factory, instance, args, kwargs)
        plan = make_plan(
            lambda: find_model(arguments, model),
            lambda: find_patterns(arguments, role, patterns, config),
            role=role,
            name_map=name_map,
            group=group,
        )
        call = _Call()
        if not plan.patterns:
            yield call
            _leave_alone(role, call.result, group)
            return
        with plan.frozen():
            yield call
            proof = plan.prove(call.result)
        plan.record(proof)

    async def call_later(factory: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with freezing(factory, instance, args, kwargs) as call:
            call.result = await factory(*args, **kwargs)
        return call.result

    def call_now(factory: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(factory):
            return call_later(factory, instance, args, kwargs)
        with freezing(factory, instance, args, kwargs) as call:
            call.result = factory(*args, **kwargs)
        return call.result

    return lambda factory: _Decorated(factory, call_now)  # type: ignore[return-value]


def freezing_hook(
    role: str, patterns: Sequence[str], *, name_map: NameMap = None, group: ranks.Group = None
) -> Callable[[Model], Model]:
    """A pre-wrap hook that freezes: gets the model, or a list of chunks, and returns the same.

    For frameworks that build and wrap a model in one go: `provider.register_pre_wrap_hook(...)` of
    Megatron-Bridge. A factory that is decorated with the same role and list then proves the freeze.
    Arguments and errors are those of `plan_freezing`.
    """

    def hook(model: Model) -> Model:
        freeze_parameters(model, patterns, role=role, name_map=name_map, group=group)  # type: ignore[arg-type]
        return model

    return hook


@dataclass
class _Call:
    result: Any = None


def _leave_alone(role: str, result: object, group: ranks.Group) -> None:
    """Remember an optimizer whose role freezes nothing: it may still not hold what was frozen before."""
    try:
        optimizers = find_optimizers(result)
    except Exception:
        optimizers = []  # what can't be seen into is no fault where nothing is to be frozen
    prove_apart(role, {id(parameter) for _, held in optimizers for parameter in held})
    record(FreezeReport(role), optimizers=[optimizer for optimizer, _ in optimizers], group=group)


class _DecoratedMethod(wrapt.BoundFunctionWrapper[Any, Any]):
    """A decorated function as an attribute of a class or an instance."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = self._self_instance if self._self_binding != "staticmethod" else None
        return getattr, (self._self_owner if owner is None else owner, self.__name__)


class _Decorated(wrapt.FunctionWrapper[Any, Any]):
    """wrapt's wrapper, which can be pickled: by name, as functions are."""

    __bound_function_wrapper__ = _DecoratedMethod

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__qualname__)
