"""The list changes in mid-run: as a loop that edits flags, groups and state by hand, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import frozen_opt
from frozen_opt import migrate_optimizer_state, with_freezing
from frozen_opt.optimizers_by_name import build_optimizer
from tests.models import Transformer, train, transformer
from tests.versions import MUON

LISTS = [["*.gate.weight", "embedding.weight"], ["*.gate.weight"], [], ["layers.0.*", "*.gate.weight"]]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": "AdamW", "adam_betas": (0.9, 0.99)},
    "SGD": {"optimizer": "SGD", "optimizer_kwargs": {"momentum": 0.9}},
    "Adafactor": {"optimizer": "Adafactor"},
    "Muon": {"optimizer": "Muon", "optimizer_kwargs": {"muon_lr": 0.02}},
}


def build(model: nn.Module, name: str) -> Any:
    settings = {"lr": 0.01, "weight_decay": 0.1, **OPTIMIZERS[name]}
    return build_optimizer(model, {"optimizer_config": settings})


def with_lists(name: str, make: Callable[[], Transformer] = transformer) -> tuple[Transformer, Any]:
    """The documented way: the factory again, and the state moved."""
    model, optimizer = make(), None
    for patterns in LISTS:
        before, factory = optimizer, with_freezing("policy", patterns=patterns)(build)
        optimizer = factory(model, name)
        if before is not None:
            optimizer.load_state_dict(migrate_optimizer_state(before, optimizer, model))
        step_twice(model, optimizer)
    return model, optimizer


def by_hand(name: str, make: Callable[[], Transformer] = transformer) -> tuple[Transformer, Any]:
    """One optimizer over everything; what a list freezes is taken out of its group, and put back in order."""
    model = make()
    optimizer = build(model, name)
    parts = getattr(optimizer, "optimizers", [optimizer])
    members = [[list(group["params"]) for group in part.param_groups] for part in parts]
    for patterns in LISTS:
        model.requires_grad_(True)
        frozen_opt.reset()
        names = frozen_opt.plan_freezing(model, patterns, role="by hand").names
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name not in names)
            if parameter_name in names:
                for part in parts:
                    part.state.pop(parameter, None)
        for part, groups in zip(parts, members, strict=True):
            for group, whole in zip(part.param_groups, groups, strict=True):
                group["params"] = [parameter for parameter in whole if parameter.requires_grad]
        step_twice(model, optimizer)
    return model, optimizer


def step_twice(model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer, steps=2)
    optimizer.zero_grad()


def local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)


def compare(name: str, make: Callable[[], Transformer] = transformer) -> None:
    model, optimizer = with_lists(name, make)
    other, expected = by_hand(name, make)
    for parameter, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(parameter), local(theirs))
        state, their_state = dict(optimizer.state.get(parameter, {})), dict(expected.state.get(theirs, {}))
        assert state.keys() == their_state.keys()
        for key, value in state.items():
            assert torch.equal(local(value), local(their_state[key])), key


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", MUON])
def test_three_changes_are_those_of_a_run_by_hand(name: str) -> None:
    compare(name)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01)


def schedules() -> dict[str, Callable[[Any], Any]]:
    schedulers = torch.optim.lr_scheduler
    return {
        "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
        "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2, gamma=0.5),
    }


@pytest.mark.parametrize("schedule", schedules())
def test_a_scheduler_goes_on_from_its_place(schedule: str) -> None:
    rates: dict[bool, list[float]] = {}
    for change in (False, True):
        model = transformer()
        optimizer = with_freezing("policy", patterns=LISTS[0])(adamw)(model)
        scheduler = schedules()[schedule](optimizer)
        rates[change] = []
        for step in range(6):
            if change and step == 3:
                before, optimizer = optimizer, with_freezing("policy", patterns=LISTS[1])(adamw)(model)
                optimizer.load_state_dict(migrate_optimizer_state(before, optimizer, model))
                scheduler.optimizer = optimizer
            train(model, optimizer, steps=1)
            scheduler.step()
            rates[change].append(optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups[0]["initial_lr"] == 0.01
    assert rates[True] == rates[False]
    assert len(set(rates[True])) > 2


def test_gradient_clipping_and_scaling_go_on() -> None:
    model, scaler = transformer(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = with_freezing("policy", patterns=LISTS[0])(adamw)(model)
    for patterns in LISTS[1:]:
        for _ in range(2):
            loss = model(torch.tensor([[1, 2, 3]])).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            trained = [p for p in model.parameters() if p.requires_grad]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert norm.isfinite()
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
            assert torch.stack([p.grad.norm() for p in trained]).norm() <= 0.5 + 1e-5
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        before, optimizer = optimizer, with_freezing("policy", patterns=patterns)(adamw)(model)
        optimizer.load_state_dict(migrate_optimizer_state(before, optimizer, model))
