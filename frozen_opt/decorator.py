"""`with_freezing`: freeze before a factory builds the optimizer, and prove it afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import WRAPPER_UPDATES, update_wrapper
from typing import Any, TypeVar

from torch import nn

from frozen_opt.arguments import (
    Arguments,
    Default,
    Patterns,
    bind,
    find_built,
    find_model,
    find_patterns,
    find_role,
)
from frozen_opt.matching.selection import NameMap
from frozen_opt.plan import make_plan
from frozen_opt.ranks import collectives

Factory = TypeVar("Factory", bound=Callable[..., Any])


def with_freezing(
    role: str | Callable[[Arguments], str],
    *,
    patterns: Patterns = Default.FROM_CONFIG,
    config: str | None = None,
    model: str | Callable[[Arguments], Any] | None = None,
    name_map: NameMap = None,
    group: collectives.Group = None,
) -> Callable[[Factory], Factory]:
    """Decorate an optimizer factory: it gets the model with the role's parameters frozen already.

    Works on functions, methods (constructors as well), class methods, static methods, coroutines, partials
    and objects with `__call__`. What comes back is a plain function with the factory's signature, name and
    docstring, which pickles by name and by value, and so gets into Ray actors. If anything fails, the
    model's requires_grad flags are put back.

        @with_freezing("policy")
        def build_optimizer(model, config): ...

    Args:
        role: `policy`, `critic`, or any other name; names the config's node, the metrics and the errors. For
            one class that serves several roles, a dotted path such as `self.role`, or a callable of the
            call's bound arguments.
        patterns: The list itself (None is an empty one), or a callable that gets the call's bound arguments
            and returns it. By default the config says: `trainer.<role>.freeze_parameters`.
        config: The argument that holds the config, or a dotted path such as `self.cfg`. By default
            `config`, `cfg`, `self.cfg`, `self.config`, the first that is there.
        model: The argument that holds the model (a module, or a list of chunks), or a callable of the
            bound arguments. By default `model`, `module`, `models`, `model_chunks`, then the only argument
            that is one, or that has one in a tuple, then `self.model`, `self.module`, `self.models`.
        name_map: More names for the parameters; see `plan_freezing`.
        group: The ranks that agree; all by default. Each of them must call, with the same list.

    Raises:
        FreezingError: On the call, as one of its subclasses; see `plan_freezing`, and:
        FrozenParameterInOptimizerError: The optimizer holds a frozen parameter.
        UnsupportedBackendError: There is no optimizer in what the factory returned nor in `self.optimizer`,
            or it can't be checked.
    """
    if not isinstance(role, str) and (not callable(role) or isinstance(role, type | nn.Module)):
        raise TypeError('with_freezing takes a role: write @with_freezing("policy")')
    freezing = _Freezing(role, patterns, config, model, name_map, group)

    def decorate(*factories: Factory) -> Factory:
        if len(factories) != 1 or isinstance(factories[0], nn.Module):
            raise TypeError('with_freezing takes a role: write @with_freezing("policy")')
        decorated: Factory = _decorated(factories[0], freezing)
        return decorated

    return decorate


@dataclass(frozen=True)
class _Freezing:
    """What a decorator was told: the arguments of `with_freezing`."""

    role: str | Callable[[Arguments], str]
    patterns: Patterns
    config: str | None
    model: str | Callable[[Arguments], Any] | None
    name_map: NameMap
    group: collectives.Group


@dataclass
class _Call:
    result: Any = None


def _decorated(factory: Any, freezing: _Freezing) -> Any:
    if isinstance(factory, staticmethod | classmethod):
        return type(factory)(_decorated(factory.__func__, freezing))
    if isinstance(factory, type) or not callable(factory):
        name = getattr(factory, "__name__", type(factory).__name__)
        raise TypeError(
            f"with_freezing can't decorate {name}, which is a "
            f"{'class' if isinstance(factory, type) else 'value'} and no factory: decorate the function or "
            "method that builds the optimizer, the class's own __init__, or "
            f"lambda model: {name}(trainable_parameters(model), ...)"
        )

    # Plain functions, since wrapt's proxies pass for what they wrap: picklers by value drop them.
    def call_now(*args: Any, **kwargs: Any) -> Any:
        with _around(factory, freezing, args, kwargs) as call:
            call.result = factory(*args, **kwargs)
        return call.result

    async def call_later(*args: Any, **kwargs: Any) -> Any:
        with _around(factory, freezing, args, kwargs) as call:
            call.result = await factory(*args, **kwargs)
        return call.result

    decorated = call_later if inspect.iscoroutinefunction(factory) else call_now
    # The attributes of an object that is called are its own.
    return update_wrapper(decorated, factory, updated=WRAPPER_UPDATES if inspect.isroutine(factory) else ())


@contextmanager
def _around(
    factory: Callable[..., Any], freezing: _Freezing, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[_Call]:
    """The steps of a decorated call; the factory runs in the body."""
    arguments = bind(factory, args, kwargs)
    role = find_role(arguments, freezing.role)
    plan = make_plan(
        lambda: find_model(arguments, freezing.model),
        lambda: find_patterns(arguments, role, freezing.patterns, freezing.config),
        role=role,
        name_map=freezing.name_map,
        group=freezing.group,
    )
    call = _Call()
    if plan.idle:
        yield call
        plan.leave_alone(_built_or_none(factory, arguments, call.result))
        return
    with plan.applied():
        yield call
        outcome = plan.prove(find_built(factory, arguments, call.result))
    plan.leave_traces(outcome, plan.record(outcome))


def _built_or_none(factory: Callable[..., Any], arguments: Arguments, result: object) -> Any:
    """What was built, where nothing is to be frozen: what can't be seen into is no fault then."""
    try:
        return find_built(factory, arguments, result)
    except Exception:
        return []
