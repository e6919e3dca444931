"""A driver script of Ray's: actors of its own classes, which travel by value, and of a module's, by name."""

import json

import ray

from tests import survival
from tests.survival import METHODS


class Scripted(survival.Worker):
    """Of this script: its class is pickled, with what it inherits from a module."""

    @survival.with_freezing("policy", patterns=survival.PATTERNS)
    def own(self, model):
        return survival.sgd(model)


@ray.remote
class Decorated(survival.Worker):
    """`@ray.remote` on a class of the script."""

    @survival.with_freezing("critic", patterns=survival.PATTERNS)
    def own(self, model):
        return survival.sgd(model)


@ray.remote
class Whole:
    """All of it is of this script."""

    @survival.with_freezing("policy", patterns=["0.*"])
    def own(self, model):
        return survival.sgd(model)

    def run(self, name):
        model = survival.net()
        getattr(self, name)(model)
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
        return survival.frozen_opt.metrics()


ACTORS = {
    "ray.remote(Class) of a module": (ray.remote(survival.Worker), METHODS),
    "ray.remote(Class) that inherits": (ray.remote(survival.Heir), METHODS),
    "ray.remote(Class) with async methods": (ray.remote(survival.AsyncWorker), (*METHODS, "later")),
    "ray.remote(Class) of the script": (ray.remote(Scripted), (*METHODS, "own")),
    "@ray.remote of the script": (Decorated, (*METHODS, "own")),
    "@ray.remote, all of the script": (Whole, ("own",)),
}

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    told = {}
    for name, (actor, methods) in ACTORS.items():
        worker = actor.options(num_cpus=0).remote()
        told[name] = {method: ray.get(worker.run.remote(method), timeout=300) for method in methods}
        ray.kill(worker)
    ray.shutdown()
    print(json.dumps(told))
