"""Canonical names: what a parameter is called in the bare architecture, whatever wraps it.

Execution wrappers are known by their type, never by the text of a name: an architecture may well own a
submodule called `module` or `_orig_mod`. The component between a wrapper and what it wraps is dropped,
at the root and anywhere below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from frozen_opt.errors import UnsupportedBackendError
from frozen_opt.matching.places import Place
from frozen_opt.matching.wrappers import qualified_name, wrapper_attribute

Renumbering: TypeAlias = Mapping[int, Mapping[str, str]]
"""id of a module -> for its children and parameters, local component -> global component."""

_RENUMBERED: dict[str, Callable[[Any], Renumbering]] = {}


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


Step: TypeAlias = tuple["Step | None", nn.Module, str, nn.Module]
"""A step of the way from a chunk to a parameter: the one before, and what parent holds under which key."""


class Found(NamedTuple):
    """A parameter that the walk found, under one of its names."""

    name: str
    attribute: str
    parameter: nn.Parameter
    owner: nn.Module
    verdict: Any
    step: Step | None = None
    """The last one on the way to its owner; None where that is a chunk itself."""
    ties: Sequence[Found] = ()
    """The same parameter under its other names, where they have been looked for."""
    mapped: Sequence[str] = ()
    """The names of a name map by which the patterns matched."""

    @property
    def place(self) -> Place:
        return Place.of(self.owner, self.attribute)


@dataclass
class Walk:
    """What one pass over a model found."""

    chunks: Sequence[nn.Module]
    found: list[Found] = field(default_factory=list)
    """Parameters with a verdict, in model order, tied ones under each of their names."""
    tables: list[Mapping[str, nn.Parameter | None]] = field(default_factory=list)
    """Of each module its parameters by attribute, in model order."""
    wrappers: list[nn.Module] = field(default_factory=list)
    """The execution wrappers met."""
    buffered: list[tuple[str, nn.Module]] = field(default_factory=list)
    """The modules with buffers, after what their canonical names begin with."""
    classes: set[str] = field(default_factory=set)
    """Qualified names of all classes (bases included) of which the model holds an instance."""
    repeats: bool = False
    """Whether it met a module with modules inside it in several places."""

    def each_parameter(self) -> Iterator[nn.Parameter]:
        """All of them, in model order, tied ones as often as they have names; just now, not as of the walk.

        To touch the memory of each costs a third of the walk.
        """
        return (each for table in self.tables for each in table.values() if each is not None)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """`each_parameter`, when first asked for."""
        return list(self.each_parameter())


class _Everything:
    """A matcher's state in which every name gets a verdict: for walks that want all parameters."""

    may_end = True

    def __init__(self) -> None:
        self.after = defaultdict[str, _Everything](lambda: self)
        self.verdicts = defaultdict[str, bool](lambda: True)


def walk(chunks: Sequence[nn.Module], state: Any = None) -> Walk:
    """Visit every parameter once under each of its canonical names, in model order.

    Carries a `patterns.State` down the tree, so that matching a name costs one look-up for each module. A
    large model has 100,000 of them: what is done for each counts.

    Args:
        chunks: The model; several for Megatron's virtual pipeline stages.
        state: Where the matching starts, such as `Matcher(patterns).start`. By default everything is found.
    """
    visitor = _Visitor(Walk(chunks))
    for chunk in chunks:
        visitor.visit(chunk, "", state or _Everything(), None)
    return visitor.walk


class _Visitor:
    """A walk under way."""

    __slots__ = ("inside", "plain", "renumbered", "walk")

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.plain: set[type] = set()  # classes of which nothing special is known
        self.renumbered: dict[int, Mapping[str, str]] = {}
        # Id of a module -> is the walk in it? One may hold its own ancestor; torch's walk ends there too.
        self.inside: dict[int, bool] = {}

    def visit(self, module: nn.Module, prefix: str, state: Any, step: Step | None) -> None:
        """Visit a module and all below it.

        Args:
            module: The module.
            prefix: What names begin with in it.
            state: The matcher's, after this prefix.
            step: The last one on the way to it.
        """
        plain, tables, inside, make = self.plain, self.walk.tables, self.inside, tuple.__new__
        wrapped = None if type(module) in plain else self._special(module)
        renumbered = self.renumbered
        local = renumbered.get(id(module)) if renumbered else None
        if id(module) in inside:
            self.walk.repeats = True
        inside[id(module)] = True
        held = module.__dict__  # an attribute of a module takes twice as long as a key
        if held["_parameters"] or held["_buffers"]:
            self._take(module, prefix, state, step, local)
        after = state.after
        for key, child in held["_modules"].items():
            if child is None or key == wrapped:
                if child is not None and not inside.get(id(child)):
                    self.visit(child, prefix, state, (step, module, key, child))
                continue
            name = key if local is None else local.get(key, key)
            held, there = child.__dict__, after[name]
            if held["_modules"] or type(child) not in plain or renumbered:
                if not inside.get(id(child)):
                    self.visit(child, f"{prefix}{name}.", there, (step, module, key, child))
                continue
            # A leaf of a class that is known by now, as most modules are: a call would double its cost.
            table = held["_parameters"]
            tables.append(table)
            if held["_buffers"]:
                self.walk.buffered.append((f"{prefix}{name}.", child))
            if not there.may_end:
                continue
            verdicts = there.verdicts
            for attribute, parameter in table.items():
                if parameter is not None and (verdict := verdicts[attribute]) is not None:
                    found = (f"{prefix}{name}.{attribute}", attribute, parameter, child, verdict)
                    self.walk.found.append(make(Found, (*found, (step, module, key, child), (), ())))
        inside[id(module)] = False

    def _take(
        self, module: nn.Module, prefix: str, state: Any, step: Step | None, local: Mapping[str, str] | None
    ) -> None:
        """Take in a module's own parameters, and that it has buffers."""
        self.walk.tables.append(module._parameters)
        for attribute, parameter in module._parameters.items():
            if parameter is None:  # a Linear without bias holds None under that name
                continue
            name = attribute if local is None else local.get(attribute, attribute)
            if (verdict := state.verdicts[name]) is not None:
                self.walk.found.append(Found(prefix + name, attribute, parameter, module, verdict, step))
        if module._buffers:
            self.walk.buffered.append((prefix, module))

    def _special(self, module: nn.Module) -> str | None:
        """Take in what is special of a module; the attribute of what it wraps, if it is a wrapper."""
        names = [qualified_name(cls) for cls in type(module).__mro__]
        self.walk.classes.update(names)
        wrapped = wrapper_attribute(names)
        renumbering = next((_RENUMBERED[name] for name in names if name in _RENUMBERED), None)
        if renumbering is not None:
            self.renumbered.update(renumbering(module))
        if wrapped is not None:
            self.walk.wrappers.append(module)
        if wrapped is None and renumbering is None:
            self.plain.add(type(module))
        return wrapped


def unwrapped(module: nn.Module) -> nn.Module:
    """The bare model inside the execution wrappers around it."""
    while (inside := module._modules.get(wrapped_attribute(module) or "")) is not None:
        module = inside
    return module


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute under which an execution wrapper holds what it wraps; None of any other module."""
    return wrapper_attribute(map(qualified_name, type(module).__mro__))
