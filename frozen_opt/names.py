"""Canonical names: what a parameter is called in the bare architecture, whatever wraps it.

Execution wrappers are known by their type, never by the text of a name: an architecture may well own a
submodule called `module` or `_orig_mod`. The component between a wrapper and what it wraps is dropped,
at the root and anywhere below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from frozen_opt.errors import UnsupportedBackendError
from frozen_opt.places import Place

Renumbering: TypeAlias = Mapping[int, Mapping[str, str]]
"""id of a module -> for its children and parameters, local component -> global component."""

# Classes are named, not imported: a process that never imports DeepSpeed holds none of its engines.
_WRAPPERS: dict[str, str] = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.optim.swa_utils.AveragedModel": "module",
    "megatron.core.distributed.data_parallel_base._BaseDataParallel": "module",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
    "megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
    "megatron.core.transformer.module.Float16Module": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
    "peft.tuners.tuners_utils.BaseTunerLayer": "base_layer",
    "peft.utils.other.AuxiliaryTrainingWrapper": "original_module",
    "peft.utils.other.ModulesToSaveWrapper": "original_module",
    "peft.utils.other.TrainableTokensWrapper": "token_adapter",
    "skyrl_train.model_wrapper.HFModelWrapper": "model",
    "skyrl.backends.skyrl_train.workers.model_wrapper.HFModelWrapper": "model",
}

_RENUMBERED: dict[str, Callable[[Any], Renumbering]] = {}


def register_wrapper(cls_or_qualified_name: type[nn.Module] | str, attribute: str) -> None:
    """Teach the naming one more execution wrapper; its subclasses count as well.

    Args:
        cls_or_qualified_name: The class, or `package.module.Class` where it should not be imported.
        attribute: The name under which it registers the module that it wraps.
    """
    name = cls_or_qualified_name
    _WRAPPERS[name if isinstance(name, str) else _qualified_name(name)] = attribute


def register_renumbering(qualified_name: str, renumbering: Callable[[Any], Renumbering]) -> None:
    """For a class whose submodules are numbered from 0 on each rank: how to get the global numbers.

    Args:
        qualified_name: `package.module.Class`; its subclasses count as well.
        renumbering: Called with an instance when the walk meets it; see `Renumbering`.
    """
    _RENUMBERED[qualified_name] = renumbering


def module_list(model: object) -> list[nn.Module]:
    """The model as a list of chunks; most models are a list of one.

    Raises:
        UnsupportedBackendError: It is neither a module nor a non-empty list or tuple of modules.
    """
    chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise UnsupportedBackendError(
            f"can't freeze parameters of a {type(model).__name__}: the model must be a torch.nn.Module, "
            "or a list of them (Megatron's virtual pipeline stages)"
        )
    return chunks


class Found(NamedTuple):
    """A parameter that the walk found, under one of its names."""

    name: str
    attribute: str
    parameter: nn.Parameter
    owner: nn.Module
    verdict: Any
    ties: Sequence[Found] = ()
    """The same parameter under its other names, where they have been looked for."""
    mapped: Sequence[str] = ()
    """The names of a name map by which the patterns matched."""

    @property
    def place(self) -> Place:
        return Place(self.owner, self.attribute)


@dataclass
class Walk:
    """What one pass over a model found."""

    chunks: Sequence[nn.Module]
    found: list[Found] = field(default_factory=list)
    """Parameters with a verdict, in model order, tied ones under each of their names."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """All of them, in model order, tied ones as often as they have names."""
    wrappers: list[nn.Module] = field(default_factory=list)
    """The execution wrappers met."""
    buffered: list[tuple[str, nn.Module]] = field(default_factory=list)
    """The modules with buffers, after what their canonical names begin with."""
    classes: set[str] = field(default_factory=set)
    """Qualified names of all classes (bases included) of which the model holds an instance."""


class _Everything(dict[str, Any]):
    """A state in which every name gets a verdict: for walks that want all parameters."""

    @property
    def verdicts(self) -> _Everything:
        return self

    def __missing__(self, component: str) -> _Everything:
        return self


EVERYTHING = _Everything()


def walk(chunks: Sequence[nn.Module], state: Any = EVERYTHING) -> Walk:
    """Visit every parameter once under each of its canonical names, in model order.

    Carries a `patterns.State` down the tree, so that matching a name costs one look-up for each module.

    Args:
        chunks: The model; several for Megatron's virtual pipeline stages.
        state: Where the matching starts, such as `Matcher(patterns).start`.
    """
    result = Walk(chunks)
    found, parameters, wrappers = result.found, result.parameters, result.wrappers
    buffered = result.buffered
    types: dict[type, tuple[str | None, Callable[[Any], Renumbering] | None] | None] = {}
    renumbered: dict[int, Mapping[str, str]] = {}
    ancestors: set[int] = set()  # a module may hold its own ancestor; torch's walk ends there as well

    def visit(module: nn.Module, prefix: str, state: Any) -> None:
        kind = type(module)
        try:
            special = types[kind]
        except KeyError:
            special = types[kind] = _special(kind, result.classes)
        wrapped: str | None = None
        if special is not None:
            wrapped, renumbering = special
            if wrapped is not None:
                wrappers.append(module)
            if renumbering is not None:
                renumbered.update(renumbering(module))
        local = renumbered.get(id(module)) if renumbered else None

        if module._parameters:
            verdicts = state.verdicts
            for name, parameter in module._parameters.items():
                if parameter is not None:  # a Linear without bias holds None under that name
                    shown = name if local is None else local.get(name, name)
                    parameters.append(parameter)
                    verdict = verdicts[shown]
                    if verdict is not None:
                        found.append(Found(prefix + shown, name, parameter, module, verdict))
        if module._buffers:
            buffered.append((prefix, module))
        if module._modules:
            ancestors.add(id(module))
            for name, child in module._modules.items():
                if child is None or id(child) in ancestors:
                    continue
                if name == wrapped:
                    visit(child, prefix, state)
                    continue
                if local is not None:
                    name = local.get(name, name)
                visit(child, f"{prefix}{name}.", state[name])
            ancestors.discard(id(module))

    try:
        for chunk in chunks:
            visit(chunk, "", state)
    finally:
        # It holds itself, and would hold the model until the garbage collector comes.
        visit = None  # type: ignore[assignment]
    return result


def unwrapped(module: nn.Module) -> nn.Module:
    """The bare model inside the execution wrappers around it."""
    while (inside := module._modules.get(wrapped_attribute(module) or "")) is not None:
        module = inside
    return module


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute under which an execution wrapper holds what it wraps; None of any other module."""
    special = _special(type(module), set())
    return None if special is None else special[0]


def named_parameters(model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical names and parameters, in model order, tied parameters under each of their names.

    Args:
        model: A module, however wrapped, or Megatron's list of chunks.
    """
    return ((found.name, found.parameter) for found in walk(module_list(model)).found)


def trainable(model: nn.Module | Sequence[nn.Module]) -> list[Found]:
    """Each parameter that requires a gradient, once, as found under its first canonical name."""
    first: dict[int, Found] = {}
    for found in walk(module_list(model)).found:
        if found.parameter.requires_grad:
            first.setdefault(id(found.parameter), found)
    return list(first.values())


def trainable_named_parameters(
    model: nn.Module | Sequence[nn.Module],
) -> list[tuple[str, nn.Parameter]]:
    """Each parameter that requires a gradient, once, with its first canonical name, in model order."""
    return [(found.name, found.parameter) for found in trainable(model)]


def trainable_parameters(model: nn.Module | Sequence[nn.Module]) -> list[nn.Parameter]:
    """Each parameter that requires a gradient, once, in model order: what an optimizer should get."""
    return [found.parameter for found in trainable(model)]


def _special(kind: type, classes: set[str]) -> tuple[str | None, Callable[[Any], Renumbering] | None] | None:
    names = [_qualified_name(cls) for cls in kind.__mro__]
    classes.update(names)
    wrapped = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
    renumbering = next((_RENUMBERED[name] for name in names if name in _RENUMBERED), None)
    return (wrapped, renumbering) if wrapped or renumbering else None


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
