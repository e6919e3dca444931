"""Where in a call of an optimizer factory the model and the config are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from frozen_opt.config import has, lookup, read_patterns
from frozen_opt.errors import FreezeConfigError, UnsupportedBackendError
from frozen_opt.patterns import check_patterns

_CONFIGS = ("config", "cfg", "self.cfg", "self.config")
_MODELS = ("model", "module", "models", "model_chunks")


def bind(
    function: Callable[..., Any], instance: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The call's arguments by name, defaults included, what `**kwargs` caught in line, and `self`.

    Args:
        function: What will be called, bound if it is a method.
        instance: What it is bound to, or None.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        TypeError: As the call itself would.
    """
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = {} if instance is None else {"self": instance}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    return arguments


def find_patterns(
    arguments: Mapping[str, Any],
    role: str,
    patterns: Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str] | None] | None,
    config: str | None,
) -> list[str]:
    """The role's patterns for this call; the arguments are those of `with_freezing`.

    Raises:
        FreezeConfigError: There is no config, or no node for the role in it, or its list is malformed.
    """
    if callable(patterns):
        return check_patterns(patterns(arguments), role)
    if patterns is not None:
        return check_patterns(patterns, role)
    tried = _CONFIGS if config is None else (config,)
    for path in tried:
        found = _follow(arguments, path)
        if found is not None:
            return read_patterns(found, role)
    raise FreezeConfigError(
        f"role {role!r}: no config in this call: looked for {', '.join(tried)} among the arguments "
        f"({', '.join(arguments)}). Name the argument with with_freezing(..., config=...), or give the "
        "patterns with patterns=..."
    )


def find_model(arguments: Mapping[str, Any], model: str | Callable[[Mapping[str, Any]], Any] | None) -> Any:
    """The model, or the list of chunks, of this call; `model` is that of `with_freezing`.

    Raises:
        FreezeConfigError: There is none, or several arguments might be it.
        UnsupportedBackendError: The argument that should be the model is neither a module nor a list.
    """
    if callable(model):
        return model(arguments)
    if model is not None:
        if (found := _follow(arguments, model)) is None:
            raise FreezeConfigError(
                f"with_freezing(..., model={model!r}): the call has no such argument, only "
                f"{', '.join(arguments)}"
            )
        return found
    for name in _MODELS:
        if name in arguments and _is_model(arguments[name]):
            return arguments[name]
    for name in _MODELS:
        if name in arguments:  # rather than take another argument for it, a reward model's, say
            kind = type(arguments[name])
            raise UnsupportedBackendError(
                f"the argument {name} is a {kind.__module__}.{kind.__qualname__}, and must be a "
                "torch.nn.Module or a list of them: frozen_opt can't freeze parameters of anything else. If "
                "another argument is the model, name it with with_freezing(..., model=...)"
            )
    candidates = [name for name, value in arguments.items() if _is_model(value)]
    if len(candidates) == 1:
        return arguments[candidates[0]]
    raise FreezeConfigError(
        f"{'several arguments might be' if candidates else 'no argument is'} the model "
        f"({', '.join(candidates or arguments)}): name it with with_freezing(..., model=...)"
    )


def _follow(arguments: Mapping[str, Any], path: str) -> Any:
    node: Any = arguments
    for key in path.split("."):
        node = lookup(node, key) if has(node, key) else None
    return node


def _is_model(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(isinstance(item, nn.Module) for item in value)
    return isinstance(value, nn.Module)
