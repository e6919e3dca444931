"""Resuming under another freeze list: noticed by name, and the kept state moved bit for bit."""

import io
import json
from typing import Any

import pytest
import torch
from torch import nn

import frozen_opt
from frozen_opt import FreezeReport, migrate_optimizer_state
from frozen_opt.optimizers_by_name import build_optimizer
from tests.models import Transformer, train, transformer

GATES, NORMS = ["*.mlp.gate.weight"], ["*.norm.weight"]
GATE_NAMES = [f"layers.{i}.mlp.gate.weight" for i in range(2)]
NORM_NAMES = [f"layers.{i}.norm.weight" for i in range(2)]


def start(patterns: list[str], *, groups: bool = False, **options: Any) -> tuple[Any, Any, FreezeReport]:
    """A model, its optimizer (with two groups, as trainers have it, if so wanted), and the report."""
    model = transformer()
    report = frozen_opt.freeze_parameters(model, patterns, role="policy")
    if groups:
        config = {"optimizer_config": {"lr": 0.01, "weight_decay": 0.1}}
        return model, build_optimizer(model, config), report
    return model, torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01, **options), report


def checkpoint(
    model: Transformer, optimizer: torch.optim.Optimizer, freeze: dict[str, Any]
) -> dict[str, Any]:
    """Through torch.save and back."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "freeze": freeze}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in frozen_opt.named_parameters(model)}
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_same_freeze_resumes() -> None:
    _, _, report = start(GATES)
    saved = json.loads(json.dumps(report.state_dict()))  # plain data
    assert saved["names"] == GATE_NAMES
    start(["layers.?.mlp.gate.weight"])[2].check_resume(saved)


@pytest.mark.parametrize(
    ("now", "trainable", "frozen"),
    [
        (NORMS, GATE_NAMES, NORM_NAMES),  # as many: a count would not tell
        ([*GATES, *NORMS], [], NORM_NAMES),
        (["layers.1.mlp.gate.weight"], GATE_NAMES[:1], []),
        ([], GATE_NAMES, []),
    ],
)
def test_another_freeze_is_named(now: list[str], trainable: list[str], frozen: list[str]) -> None:
    saved = start(GATES)[2].state_dict()
    with pytest.raises(frozen_opt.ResumeMismatchError, match="migrate_optimizer_state") as caught:
        start(now)[2].check_resume(saved)
    assert (caught.value.now_trainable, caught.value.now_frozen) == (tuple(trainable), tuple(frozen))
    assert ("frozen then, trainable now: layers" in str(caught.value)) == bool(trainable)
    assert ("trainable then, frozen now: layers" in str(caught.value)) == bool(frozen)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ({}, "no list of names"),
        ({"names": "embedding.weight", "role": "policy"}, "no list of names"),
        ({"names": [1], "role": "policy"}, "no list of names"),
        ({"names": [], "role": "critic"}, "is that of role 'critic'"),
        (None, "no list of names"),
    ],
)
def test_what_is_no_saved_report_is_refused(saved: Any, text: str) -> None:
    with pytest.raises(frozen_opt.FreezeConfigError, match=text):
        start(GATES)[2].check_resume(saved)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    ("then", "now"),
    [
        (GATES, [*GATES, *NORMS]),  # more is frozen
        ([*GATES, *NORMS], GATES),  # less is frozen
        (GATES, NORMS),  # both, and as many
        ([], GATES),
        (GATES, []),
        (GATES, GATES),
    ],
)
def test_state_moves_by_name_both_ways(then: list[str], now: list[str], groups: bool) -> None:
    model, optimizer, report = start(then, groups=groups)
    train(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.003  # what a scheduler has made of it
    kept = by_name(model, optimizer)
    saved = checkpoint(model, optimizer, report.state_dict(model, optimizer))

    model, optimizer, report = start(now, groups=groups)
    model.load_state_dict(saved["model"])
    if then == now:
        report.check_resume(saved["freeze"])
    else:
        with pytest.raises(frozen_opt.ResumeMismatchError):
            report.check_resume(saved["freeze"])
    optimizer.load_state_dict(
        migrate_optimizer_state(saved["optimizer"], optimizer, model, saved=saved["freeze"])
    )
    moved = by_name(model, optimizer)
    trained = {name for name, parameter in frozen_opt.named_parameters(model) if parameter.requires_grad}
    assert moved.keys() == kept.keys() & trained
    assert all(same(moved[name], kept[name]) for name in moved)
    for group in optimizer.param_groups:
        was_there = any(parameter in optimizer.state for parameter in group["params"])
        assert group["lr"] == (0.003 if was_there else 0.01)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == ([0.01] if not groups else [0.1] if NORMS[0] in now else [0.1, 0.0])

    before = {name: parameter.detach().clone() for name, parameter in frozen_opt.named_parameters(model)}
    train(model, optimizer, steps=1)
    report.verify(model, optimizer)
    after = dict(frozen_opt.named_parameters(model))
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    steps = {name: int(state["step"]) for name, state in by_name(model, optimizer).items()}
    assert steps == {name: 4 if name in kept else 1 for name in trained}


def test_names_come_from_an_optimizer_that_was_built_with_them() -> None:
    model = transformer()
    frozen_opt.freeze_parameters(model, GATES, role="policy")
    optimizer = torch.optim.AdamW(frozen_opt.trainable_named_parameters(model))
    train(model, optimizer)
    kept = by_name(model, optimizer)
    saved = optimizer.state_dict()
    model, optimizer, _ = start(NORMS)
    optimizer.load_state_dict(migrate_optimizer_state(saved, optimizer, model))
    moved = by_name(model, optimizer)
    assert moved.keys() == kept.keys() - {*NORM_NAMES}
    assert all(same(moved[name], kept[name]) for name in moved)


def test_a_bare_report_will_do_for_one_group_in_model_order() -> None:
    model, optimizer, report = start(GATES)
    train(model, optimizer)
    kept, saved, freeze = by_name(model, optimizer), optimizer.state_dict(), report.state_dict()
    model, optimizer, _ = start(NORMS)
    optimizer.load_state_dict(migrate_optimizer_state(saved, optimizer, model, saved=freeze))
    moved = by_name(model, optimizer)
    assert moved.keys() == kept.keys() - {*NORM_NAMES}
    assert all(same(moved[name], kept[name]) for name in moved)


def test_names_that_can_not_be_told_are_not_guessed() -> None:
    model, optimizer, report = start(GATES)
    train(model, optimizer)
    saved, freeze = optimizer.state_dict(), report.state_dict()
    backwards = torch.optim.AdamW(frozen_opt.trainable_parameters(model)[::-1])
    train(model, backwards)
    _, two, two_report = start(GATES, groups=True)
    cases = [
        (saved, None),  # no report
        (backwards.state_dict(), freeze),  # another order
        (saved, start([])[2].state_dict()),  # another number
        (two.state_dict(), two_report.state_dict()),  # several groups
    ]
    model, optimizer, _ = start(NORMS)
    for state, names in cases:
        with pytest.raises(frozen_opt.FreezeConfigError, match="it can't be told which"):
            migrate_optimizer_state(state, optimizer, model, saved=names)


def test_groups_that_are_drawn_otherwise_are_refused() -> None:
    model, optimizer, report = start(GATES, groups=True)
    saved = optimizer.state_dict(), report.state_dict(model, optimizer)
    model, optimizer, _ = start([])
    with pytest.raises(frozen_opt.FreezeConfigError, match="in several with other settings then"):
        migrate_optimizer_state(saved[0], optimizer, model, saved=saved[1])


def test_what_has_no_names_is_refused() -> None:
    model, optimizer, report = start(GATES)
    copies = torch.optim.SGD([parameter.detach().clone() for parameter in model.parameters()], lr=0.1)
    with pytest.raises(frozen_opt.FreezeConfigError, match="not the model's"):
        report.state_dict(model, copies)
    with pytest.raises(frozen_opt.FreezeConfigError, match="lacks state and param_groups"):
        migrate_optimizer_state({"optimizers": []}, optimizer, model)
