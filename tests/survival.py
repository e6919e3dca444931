"""Factories in all the forms in which a decorator may get lost, for a process that pickles them by value.

Run as a script, its classes and functions belong to `__main__`, so that cloudpickle, and with it Ray, ships
them by value.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn

import frozen_opt
from frozen_opt import trainable_parameters, with_freezing

PATTERNS = ["0.*"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable_parameters(model))


@with_freezing("policy", patterns=PATTERNS)
def build(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model)


def caller(model: nn.Module) -> torch.optim.Optimizer:
    return build(model)


def closure() -> Callable[[nn.Module], torch.optim.Optimizer]:
    @with_freezing("policy", patterns=PATTERNS)
    def inner(model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    return inner


class Worker:
    """What an actor is made of."""

    role = "policy"

    @with_freezing("self.role", patterns=PATTERNS)
    def method(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    @with_freezing("policy", patterns=PATTERNS)
    @staticmethod
    def static(model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    @staticmethod
    @with_freezing("policy", patterns=PATTERNS)
    def static_outside(model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    @with_freezing("policy", patterns=PATTERNS)
    @classmethod
    def of_class(cls, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    @classmethod
    @with_freezing("policy", patterns=PATTERNS)
    def of_class_outside(cls, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    @with_freezing("policy", patterns=PATTERNS)
    async def later(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    def plain(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    def run(self, name: str) -> dict[str, int]:
        """In an actor: build by the method of that name, and tell the driver what was frozen."""
        model = net()
        getattr(self, name)(model)
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
        return frozen_opt.metrics()


class Heir(Worker):
    """Inherits all its decorated methods."""


class AsyncWorker(Worker):
    async def run(self, name: str) -> dict[str, int]:
        model = net()
        result = getattr(self, name)(model)
        if name == "later":
            await result
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
        return frozen_opt.metrics()


@dataclasses.dataclass
class Spec:
    """A config that holds a factory."""

    build_optimizer_fn: Callable[..., Any] = build


METHODS = ("method", "static", "static_outside", "of_class", "of_class_outside")


def forms() -> dict[str, Callable[[nn.Module], Any]]:
    """Callables of a model, by what they are."""
    worker = Worker()
    found: dict[str, Callable[[nn.Module], Any]] = {
        "function": build,
        "caller": caller,
        "closure": closure(),
        "bound, decorated by hand": with_freezing("policy", patterns=PATTERNS)(worker.plain),
        "in a dataclass": Spec().build_optimizer_fn,
        "lambda": with_freezing("policy", patterns=PATTERNS)(lambda model: sgd(model)),
        "object": with_freezing("policy", patterns=PATTERNS)(Called()),
    }
    for method in METHODS:
        found[method] = getattr(worker, method)
        found[f"inherited {method}"] = getattr(Heir(), method)
    return found


class Called:
    """A callable object."""

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)


if __name__ == "__main__":  # write every form by value, for another process to load
    classes = {"class Worker": Worker, "class Heir": Heir}
    sys.stdout.buffer.write(cloudpickle.dumps({**forms(), **classes}))
