"""`decorate`: a factory in a module that one can't edit, by its path."""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import frozen_opt
from frozen_opt import FreezeConfigError
from tests.models import flags
from tests.survival import net

SOURCE = '''
import torch
from frozen_opt import trainable_parameters


def build(model):
    """Builds."""
    return torch.optim.SGD(trainable_parameters(model))


class Base:
    def inherited(self, model):
        return build(model)


class Strategy(Base):
    def method(self, model):
        return build(model)

    @staticmethod
    def static(model):
        return build(model)

    @classmethod
    def of_class(cls, model):
        assert cls is Strategy
        return build(model)

    class Inner:
        def method(self, model):
            return build(model)
'''
PATTERNS = ["0.*"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A trainer's package, not imported yet."""
    folder = tmp_path / "a_trainer"
    folder.mkdir()
    (folder / "__init__.py").write_text("imported = True\n")
    (folder / "factories.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("a_trainer")]:
        del sys.modules[name]


def freezes(factory: Any) -> bool:
    model = net()
    factory(model)
    frozen = [not flag for flag in flags(model).values()]
    assert frozen in ([True, True, False, False], [False] * 4)
    return any(frozen)


CALLS = {
    "build": lambda module: module.build,
    "Strategy.method": lambda module: module.Strategy().method,
    "Strategy.static": lambda module: module.Strategy.static,
    "Strategy.of_class": lambda module: module.Strategy.of_class,
    "Strategy.inherited": lambda module: module.Strategy().inherited,
    "Strategy.Inner.method": lambda module: module.Strategy.Inner().method,
}


@pytest.mark.parametrize("when", ["at once", "at its import"])
@pytest.mark.parametrize("path", CALLS)
def test_every_form_is_decorated_and_given_back(package: Path, path: str, when: str) -> None:
    if when == "at once":
        import a_trainer.factories as module
    decoration = frozen_opt.decorate(f"a_trainer.factories:{path}", "policy", patterns=PATTERNS)
    assert ("a_trainer" in sys.modules) == (when == "at once")  # looking for it imported nothing
    import a_trainer.factories as module

    before = inspect.getattr_static(module.Strategy, "static")
    assert freezes(CALLS[path](module))
    assert isinstance(before, staticmethod)
    assert not freezes(module.Base().inherited) or path == "build"
    decoration.undo()
    decoration.undo()
    assert not freezes(CALLS[path](module))
    assert "inherited" not in vars(module.Strategy)


def test_as_a_context_manager_and_twice(package: Path) -> None:
    import a_trainer.factories as module

    original = module.build
    target = "a_trainer.factories:build"
    with frozen_opt.decorate(target, "policy", patterns=PATTERNS):
        decorated = module.build
        assert decorated.__doc__ == "Builds."
        with frozen_opt.decorate(target, "policy", patterns=PATTERNS):
            assert module.build is decorated
        assert freezes(module.build)
        with pytest.raises(FreezeConfigError, match=r"decorated already, with another role"):
            frozen_opt.decorate(target, "critic", patterns=PATTERNS)
    assert module.build is original


def test_undone_before_the_import_it_decorates_nothing(package: Path) -> None:
    frozen_opt.decorate("a_trainer.factories:build", "policy", patterns=PATTERNS).undo()
    import a_trainer.factories as module

    assert not freezes(module.build)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("a_trainer.factories:biuld", r"a_trainer\.factories has no biuld: no biuld in .*the closest: build"),
        ("a_trainer.factories:Strategy.metod", r"no metod in Strategy; the closest: method"),
        ("a_trainer.factorys:build", r"there is no module a_trainer\.factorys; the closest: factories"),
        ("a_trainer.factories.deeper:build", r"there is no module a_trainer\.factories\.deeper"),
        ("a_triner:build", r"there is no module a_triner"),
        ("a_trainer.factories.build", r"is no path to a factory: write package\.module:function"),
    ],
)
def test_what_is_not_there_is_an_error_with_the_closest_names(package: Path, target: str, says: str) -> None:
    if says.startswith(("a_", "no ")):  # else the import would tell
        import_module("a_trainer.factories")
    with pytest.raises(FreezeConfigError, match=says):
        frozen_opt.decorate(target, "policy", patterns=PATTERNS)
    import a_trainer.factories as module

    assert not freezes(module.build)


def test_a_name_that_the_import_does_not_bring_is_an_error_of_the_import(package: Path) -> None:
    for _ in range(2):  # nothing of the first attempt is left
        frozen_opt.decorate("a_trainer.factories:biuld", "policy", patterns=PATTERNS)
        with pytest.raises(FreezeConfigError, match=r"the closest: build"):
            import_module("a_trainer.factories")
        sys.modules.pop("a_trainer.factories", None)
    import_module("a_trainer.factories")


def test_a_class_is_no_factory(package: Path) -> None:
    import a_trainer.factories  # noqa: F401

    with pytest.raises(
        TypeError, match=r"can't decorate Strategy, which is a class and no factory.*__init__"
    ):
        frozen_opt.decorate("a_trainer.factories:Strategy", "policy", patterns=PATTERNS)
    with pytest.raises(
        TypeError, match=r"can't decorate SGD.*lambda model: SGD\(trainable_parameters\(model\)"
    ):
        frozen_opt.with_freezing("policy")(torch.optim.SGD)
    with pytest.raises(TypeError, match=r"can't decorate int, which is a value"):
        frozen_opt.with_freezing("policy")(3)  # type: ignore[type-var]


def test_a_package_that_keeps_paths_in_place_of_strings(package: Path) -> None:
    import a_trainer

    assert a_trainer.__spec__ is not None
    a_trainer.__spec__.submodule_search_locations = [package]  # type: ignore[list-item]  # as transformers'
    frozen_opt.decorate("a_trainer.factories:build", "policy", patterns=PATTERNS).undo()


def test_a_constructor_of_torch_itself() -> None:
    class Container:
        def __init__(self, model: nn.Module) -> None:
            self.optimizer = torch.optim.SGD(frozen_opt.trainable_parameters(model))

    Container.__qualname__ = "Container"
    sys.modules[__name__].Container = Container  # type: ignore[attr-defined]
    with frozen_opt.decorate(f"{__name__}:Container.__init__", "policy", patterns=PATTERNS):
        assert freezes(Container)
    assert not freezes(Container)
