"""The decorator is not lost: pickled by name and by value, in other processes, in copies."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from frozen_opt import with_freezing
from tests import survival
from tests.models import flags
from tests.survival import METHODS, PATTERNS, Spec, Worker, net

ROOT = Path(__file__).parent.parent

LOAD = """
import pickle, sys
from torch import nn

for name, form in pickle.load(sys.stdin.buffer).items():
    calls = {name: form}
    if isinstance(form, type):
        calls = {f"{name}.{method}": getattr(form(), method) for method in METHODS}
    for name, call in calls.items():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        call(model)
        print(name, [parameter.requires_grad for parameter in model.parameters()], sep=": ")
assert "tests.survival" not in sys.modules  # what came was the code itself
"""


def test_case_23_every_form_freezes_in_a_process_that_gets_it_by_value() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(ROOT / "tests" / "survival.py")]
    written = subprocess.run(script, env=environment, check=True, capture_output=True, timeout=120)
    loaded = subprocess.run(
        [sys.executable, "-c", f"METHODS = {METHODS}\n{LOAD}"],
        env=environment,
        input=written.stdout,
        check=True,
        capture_output=True,
        timeout=120,
    )
    lines = loaded.stdout.decode().splitlines()
    assert len(lines) == len(survival.forms()) + 2 * len(METHODS)
    assert [line for line in lines if not line.endswith(": [False, False, True, True]")] == []


BY_NAME = {
    "a function": survival.build,
    "a bound method": Worker().method,
    "a static method": Worker.static,
    "a class method": Worker.of_class,
}


@pytest.mark.parametrize("by", [pickle, cloudpickle])
@pytest.mark.parametrize("what", BY_NAME)
def test_what_is_importable_pickles_by_name(what: str, by: object) -> None:
    loaded = pickle.loads(by.dumps(BY_NAME[what]))
    assert what != "a function" or loaded is survival.build
    model = net()
    loaded(model)
    assert list(flags(model).values()) == [False, False, True, True]


def test_what_pickle_cannot_find_by_name_is_an_error_and_never_the_bare_function() -> None:
    by_hand = with_freezing("policy", patterns=PATTERNS)(survival.sgd)
    for lost in (by_hand, with_freezing("policy", patterns=PATTERNS)(Worker().plain)):
        with pytest.raises(pickle.PicklingError):
            pickle.dumps(lost)


def test_case_23_copies_are_those_of_plain_functions() -> None:
    assert copy.copy(survival.build) is copy.deepcopy(survival.build) is survival.build
    assert dataclasses.asdict(Spec()) == {"build_optimizer_fn": survival.build}
    assert copy.deepcopy(Spec()).build_optimizer_fn is survival.build
    worker = Worker()
    copied = copy.deepcopy(worker.method)  # a bound method goes with a copy of its object
    assert copied.__func__ is Worker.method
    assert copied.__self__ is not worker
    holder = Worker()
    holder.factory = with_freezing("policy", patterns=PATTERNS)(holder.plain)
    assert copy.deepcopy(holder).factory is holder.factory
