"""`decorate`: put `with_freezing` on a factory in a module that one can't edit, by its path."""

from __future__ import annotations

import inspect
import sys
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType, TracebackType
from typing import Any

import wrapt

from frozen_opt.decorator import with_freezing
from frozen_opt.errors import FreezeConfigError, listing

_decorations: dict[str, Decoration] = {}
"""Those that are not undone, by target."""


class Decoration:
    """A factory that was decorated by its path. A context manager, which undoes it at its end."""

    def __init__(self, target: str, role: Any, options: dict[str, Any]) -> None:
        self.target = target
        self._given = (role, options)
        self._patched: tuple[Any, str, Any, bool] | None = None

    def undo(self) -> None:
        """Put the factory back as it was."""
        if _decorations.get(self.target) is not self:
            return
        del _decorations[self.target]
        if self._patched is None:
            return
        owner, attribute, original, inherited = self._patched
        if inherited:
            delattr(owner, attribute)
        else:
            wrapt.apply_patch(owner, attribute, original)

    def __enter__(self) -> Decoration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.undo()

    def _apply(self, module: ModuleType) -> None:
        if _decorations.get(self.target) is not self:
            return  # undone before the module was imported
        _, path = _split(self.target)
        role, options = self._given
        try:
            owner, attribute, original = _resolve(module, path)
            replacement = with_freezing(role, **options)(original)
        except BaseException:
            del _decorations[self.target]
            raise
        self._patched = owner, attribute, original, attribute not in vars(owner)
        wrapt.apply_patch(owner, attribute, replacement)


def decorate(target: str, role: Any, **options: Any) -> Decoration:
    """Decorate a factory that one can't edit: at once, or when its module gets imported.

        frozen_opt.decorate("trainer.optim:build_optimizer", "policy")

    Call it in each process that builds an optimizer, before anything takes the factory from its module by
    `from module import factory`. Doing it twice has no effect.

    Args:
        target: `package.module:function` or `package.module:Class.method`; static and class methods, and
            inherited ones, stay what they are.
        role: As in `with_freezing`, like
        options: its other arguments.

    Returns:
        Its `undo()`; as a context manager, it is undone at the end of the block.

    Raises:
        FreezeConfigError: There is no such module, class or function (where the module is yet to be imported,
            raised by that import); or it is decorated already with another role or other options.
    """
    module_name, _ = _split(target)
    known = _decorations.get(target)
    if known is not None:
        if known._given != (role, options):
            raise FreezeConfigError(
                f"{target} is decorated already, with another role or other options: undo() that one first"
            )
        return Decoration(target, role, options)  # undoing this one undoes nothing
    decoration = Decoration(target, role, options)
    _refuse_unknown_module(module_name)
    _decorations[target] = decoration
    wrapt.register_post_import_hook(decoration._apply, module_name)  # at once, if it is imported
    return decoration


def _split(target: str) -> tuple[str, str]:
    module, colon, path = target.partition(":")
    if not (module and colon and path):
        raise FreezeConfigError(
            f"{target!r} is no path to a factory: write package.module:function, or "
            "package.module:Class.method"
        )
    return module, path


def _refuse_unknown_module(name: str) -> None:
    """Look for a module along its packages, and import none of them."""
    if name in sys.modules:
        return
    first, *rest = name.split(".")
    found = first
    spec = find_spec(first)
    for part in rest:
        if spec is None:
            break
        places = [str(place) for place in spec.submodule_search_locations or ()]  # transformers has paths
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(found, places) if places else None
        if spec is None:
            close = get_close_matches(part, [module.name for module in iter_modules(places)])
            raise FreezeConfigError(
                f"there is no module {found}{_closest(close)}: it must be installed where this process runs"
            )
    if spec is None:
        raise FreezeConfigError(f"there is no module {first}: it must be installed where this process runs")


def _resolve(module: ModuleType, path: str) -> tuple[Any, str, Any]:
    """Where the factory stands, under which name, and the factory as it is kept there."""
    try:
        owner, attribute, original = wrapt.resolve_path(module, path)
    except AttributeError:
        owner = module
        for part in path.split("."):
            if not hasattr(owner, part):
                close = get_close_matches(part, dir(owner))
                raise FreezeConfigError(
                    f"{module.__name__} has no {path}: no {part} in {getattr(owner, '__name__', owner)}"
                    f"{_closest(close)}"
                ) from None
            owner = getattr(owner, part)
        raise
    if inspect.isclass(owner):
        original = inspect.getattr_static(owner, attribute)
    return owner, attribute, original


def _closest(names: list[str]) -> str:
    return f"; the closest: {listing(names)}" if names else ""
