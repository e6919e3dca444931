"""Where in a call of an optimizer factory the role, the config, the model and the optimizer are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from frozen_opt.backends.optimizer_search import find_optimizers, require_optimizers
from frozen_opt.config import has, lookup, read_patterns
from frozen_opt.errors import FreezeConfigError, UnsupportedBackendError
from frozen_opt.matching.patterns import check_patterns

Arguments: TypeAlias = Mapping[str, Any]
"""A call's arguments by name, and `self`."""


class Default(Enum):
    """Where patterns come from if nobody says; a member of an enum is itself in every process."""

    FROM_CONFIG = "from the config"


Patterns: TypeAlias = Sequence[str] | Callable[[Arguments], Sequence[str] | None] | Default | None

_CONFIGS = ("config", "cfg", "self.cfg", "self.config")
_MODELS = ("model", "module", "models", "model_chunks")
_ATTRIBUTES = ("model", "module", "models")
_OPTIMIZERS = ("optimizer", "optimizers")


class Variadic(tuple[Any, ...]):
    """What `*args` caught: several arguments, and no list of chunks."""

    __slots__ = ()


def bind(factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, defaults included, what `**kwargs` caught in line, and `self`.

    Args:
        factory: What will be called: a function, a bound method, a partial, an object with `__call__`.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        TypeError: As the call itself would.
    """
    while isinstance(factory, partial):
        args, kwargs = (*factory.args, *args), {**factory.keywords, **kwargs}
        factory = factory.func
    if not inspect.isroutine(factory):
        factory = type(factory).__call__.__get__(factory)
    signature = inspect.signature(factory)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    if inspect.ismethod(factory):
        arguments["self"] = factory.__self__
    elif args and _is_method_of(factory, args[0]):
        arguments["self"] = args[0]  # whatever the method calls it
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = Variadic(value) if kind is inspect.Parameter.VAR_POSITIONAL else value
    return arguments


def _is_method_of(function: Callable[..., Any], instance: object) -> bool:
    classes = (instance if isinstance(instance, type) else type(instance)).__mro__
    owner, _, name = getattr(function, "__qualname__", "").rpartition(".")
    return any(
        cls.__qualname__ == owner
        and cls.__module__ == function.__module__
        and not isinstance(vars(cls).get(name), staticmethod)
        for cls in classes
    )


def find_role(arguments: Arguments, role: str | Callable[[Arguments], str]) -> str:
    """The role of this call; `role` is that of `with_freezing`.

    Raises:
        FreezeConfigError: The call does not have it, or it is no string.
    """
    name = role(arguments) if callable(role) else _follow(arguments, role) if "." in role else role
    if not isinstance(name, str) or not name:
        raise FreezeConfigError(
            f"with_freezing({role if isinstance(role, str) else '<callable>'!r}): the role of this call is "
            f"{name!r}, and must be a name such as 'policy': give the name itself, the path to an attribute "
            f"that holds it, or a callable of the arguments ({', '.join(arguments)})"
        )
    return name


def find_patterns(arguments: Arguments, role: str, patterns: Patterns, config: str | None) -> list[str]:
    """The role's patterns for this call; the arguments are those of `with_freezing`.

    Raises:
        FreezeConfigError: There is no config, or no node for the role in it, or its list is malformed.
    """
    if callable(patterns):
        return check_patterns(patterns(arguments), role)
    if patterns is not Default.FROM_CONFIG:
        return check_patterns(patterns, role)
    tried = _CONFIGS if config is None else (config,)
    for path in tried:
        node = _follow(arguments, path)
        if node is not None:
            return read_patterns(node, role)
    raise FreezeConfigError(
        f"role {role!r}: no config in this call: looked for {', '.join(tried)} among the arguments "
        f"({', '.join(arguments)}). Name the argument with with_freezing(..., config=...), or give the "
        "patterns with patterns=..."
    )


def find_model(arguments: Arguments, model: str | Callable[[Arguments], Any] | None) -> Any:
    """The model, or the list of chunks, of this call; `model` is that of `with_freezing`.

    Raises:
        FreezeConfigError: There is none, or several arguments might be it.
        UnsupportedBackendError: The argument that should be the model is neither a module nor a list.
    """
    if callable(model):
        return model(arguments)
    if model is not None:
        if (value := _follow(arguments, model)) is None:
            raise FreezeConfigError(
                f"with_freezing(..., model={model!r}): the call has no such argument, only "
                f"{', '.join(arguments)}"
            )
        return value
    named = {name: arguments[name] for name in _MODELS if arguments.get(name) is not None}
    for value in named.values():
        if _is_model(value):
            return value
    for name, value in named.items():  # rather than take another argument for it, a reward model's, say
        kind = type(value)
        raise UnsupportedBackendError(
            f"the argument {name} is a {kind.__module__}.{kind.__qualname__}, and must be a "
            "torch.nn.Module or a list of them: frozen_opt can't freeze parameters of anything else. If "
            "another argument is the model, name it with with_freezing(..., model=...)"
        )
    owner = arguments.get("self")
    others = {name: value for name, value in arguments.items() if value is not owner}
    given = {name: value for name, value in others.items() if _is_model(value)}
    inside = [model for value in others.values() for model in _models_in(value)]
    for candidates in (list(given.values()), inside, [owner] if _is_model(owner) else []):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            break
    else:
        for value in (lookup(owner, name) for name in _ATTRIBUTES):
            if _is_model(value):
                return value
    raise FreezeConfigError(
        f"{'several arguments might be' if inside else 'no argument is'} the model "
        f"({', '.join(given or arguments)}): name it with with_freezing(..., model=...)"
    )


def find_built(
    factory: Callable[..., Any], arguments: Arguments, result: object
) -> list[tuple[Any, Sequence[torch.Tensor]]]:
    """The optimizers of this call, each with the model's parameters that it steps.

    In what the factory returned, else in `self.optimizer` or `self.optimizers`; a constructor may build one
    of `self`. None where the factory says that it builds none: an inference-only worker returns None in its
    place, or sets `self.optimizer` to None.

    Raises:
        UnsupportedBackendError: There is none that a backend can see into.
    """
    if _says_none(result):
        return []
    owner = arguments.get("self")
    kept = {name: lookup(owner, name) for name in _OPTIMIZERS if has(owner, name)}
    constructed = [owner] if getattr(factory, "__name__", "") == "__init__" else []
    for place in (result, *kept.values(), *constructed):
        if optimizers := find_optimizers(place):
            return optimizers
    if result is None and kept and all(value is None for value in kept.values()):
        return []
    return require_optimizers(result)


def _says_none(result: object) -> bool:
    """(model, None, None) and the like: a place for an optimizer, with None in it."""
    items: list[Any] = []
    if isinstance(result, Mapping):
        items = list(result.values())
    elif isinstance(result, list | tuple):
        items = list(result)
    elif is_dataclass(result) and not isinstance(result, type):
        items = [getattr(result, field.name) for field in fields(result)]
    plain = (type(None), str, int, float)
    return any(item is None for item in items) and all(
        isinstance(item, plain) or _is_model(item) for item in items
    )


def _follow(arguments: Arguments, path: str) -> Any:
    node: Any = arguments
    for key in path.split("."):
        node = lookup(node, key) if has(node, key) else None
    return node


def _is_model(value: object) -> bool:
    if isinstance(value, list | tuple) and not isinstance(value, Variadic):
        return len(value) > 0 and all(isinstance(item, nn.Module) for item in value)
    return isinstance(value, nn.Module)


def _models_in(value: object) -> Iterator[Any]:
    """Models in an argument, or in tuples of it, such as the (model, optimizer, scheduler) of a strategy."""
    if _is_model(value):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _models_in(item)
