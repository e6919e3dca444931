"""For the tests of a trainer: assert that it honours a freeze.

    def test_router_stays_frozen(unchanged):
        with unchanged(model, ["*.mlp.gate.weight"]):
            train(model, optimizer, steps=3)

Each function is a fixture of the same name wherever frozen_opt is installed, and what this process
remembers of frozen roles is forgotten after each test. With torch.distributed up, every rank must call,
and all of them fail where one does; each compares the shards that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from frozen_opt.backends.bits import bits, mixed_bits
from frozen_opt.backends.optimizer_search import require_optimizers
from frozen_opt.errors import listing
from frozen_opt.exclusion.proof import held_by, is_a_strangers
from frozen_opt.matching.names import module_list
from frozen_opt.matching.patterns import check_patterns
from frozen_opt.matching.selection import Selector
from frozen_opt.matching.unmatched import closest_names
from frozen_opt.parameters import resting_parameters
from frozen_opt.ranks import collectives

Model = nn.Module | Sequence[nn.Module]


def assert_frozen(model: Model, patterns: Sequence[str], *, group: collectives.Group = None) -> None:
    """Assert that every parameter that the patterns select requires no gradient.

    Args:
        model: The model, or Megatron's list of chunks.
        patterns: As in the config. Each must match something on some rank.
        group: The ranks that call; all by default.
    """
    selected = _select(model, patterns, group)
    faults = [f"{name} requires a gradient" for name, tensor in selected.items() if tensor.requires_grad]
    _agree(faults, group)


def assert_excluded(
    optimizer: object, model: Model, patterns: Sequence[str], *, group: collectives.Group = None
) -> None:
    """Assert that the optimizer steps none of the parameters that the patterns select.

    Args:
        optimizer: An optimizer that frozen_opt can see into, or what a factory returned with one in it.
        model: The model that it trains.
        patterns: As in the config. Each must match something on some rank.
        group: The ranks that call; all by default.
    """
    selected = _select(model, patterns, group)
    _agree(_held(optimizer, model, selected), group)


def assert_no_state(
    optimizer: object, model: Model, patterns: Sequence[str], *, group: collectives.Group = None
) -> None:
    """Assert `assert_excluded`, and that the optimizer keeps no state for these parameters.

    Where an optimizer keys its state by copies or flat tensors, as ZeRO does, that it steps none of the
    parameters is what tells that none of their elements is in there.

    Args:
        optimizer: An optimizer that frozen_opt can see into, or what a factory returned with one in it.
        model: The model that it trains.
        patterns: As in the config. Each must match something on some rank.
        group: The ranks that call; all by default.
    """
    selected = _select(model, patterns, group)
    faults = _held(optimizer, model, selected)
    names = {id(tensor): name for name, tensor in selected.items()}
    for each, _ in require_optimizers(optimizer):
        for key, state in getattr(each, "state", {}).items():
            if state and id(key) in names:
                faults.append(f"the optimizer keeps {listing(list(state))} for {names[id(key)]}")
    _agree(faults, group)


@contextmanager
def unchanged(model: Model, patterns: Sequence[str], *, group: collectives.Group = None) -> Iterator[None]:
    """Assert that the block leaves every bit of the selected parameters alone, and moves another one.

    Looks after each step of a torch optimizer and at the end of the block, and keeps a copy of this
    rank's shards of the selected parameters in the meantime.

    Args:
        model: The model, or Megatron's list of chunks.
        patterns: As in the config. Each must match something on some rank.
        group: The ranks that call; all by default.

    Raises:
        AssertionError: At the end of the block: what moved, by how much at most, and after which step; or
            that nothing else did.
    """
    selected = _select(model, patterns, group)
    before = {name: elements.clone() for name, elements in _elements(model, selected)}
    others = _hashes(model, selected)
    seen: dict[str, str] = {}

    def look(when: str) -> None:
        now = dict(_elements(model, selected))
        for name, elements in before.items():
            if name not in seen and (difference := _difference(elements, now.get(name))):
                seen[name] = f"{collectives.place(group)}{name} {difference} ({when})"

    with _after_each_step(lambda step: look(f"seen after optimizer step {step}")):
        yield
    look("seen at the end of the block")
    moved = _hashes(model, selected) != others
    _agree(list(seen.values()), group, moved)


def _select(model: Model, patterns: Sequence[str], group: collectives.Group) -> dict[str, nn.Parameter]:
    """The parameters of this rank that the patterns select, as they are between steps."""
    wanted = check_patterns(patterns, "test")
    if not wanted:
        raise AssertionError("there are no patterns, so that nothing would be checked")
    selection = Selector("test", wanted).select(module_list(model)).whole()
    credited = sorted({index for found in selection.matched for index in found.verdict.credited})
    findings = collectives.gather(credited, group)
    current, _ = resting_parameters(model)
    for index, pattern in enumerate(wanted):
        if not any(index in finding for finding in findings):
            closest = [name for _, name in closest_names(pattern, list(current))]
            raise AssertionError(f"{pattern!r} matches no parameter; the closest names: {listing(closest)}")
    return {found.name: current[found.name] for found in selection.chosen}


def _held(optimizer: object, model: Model, selected: Mapping[str, nn.Parameter]) -> list[str]:
    held = held_by(require_optimizers(optimizer))
    if is_a_strangers(held, resting_parameters(model)[0].values()):
        return ["the optimizer holds no parameter of the model: it trains another one, or copies"]
    return [f"the optimizer holds {name}" for name, tensor in selected.items() if id(tensor) in held]


def _agree(faults: list[str], group: collectives.Group, moved: bool = True) -> None:
    findings = collectives.gather((faults, moved), group)
    together = list(dict.fromkeys(fault for finding, _ in findings for fault in finding))
    if not any(moved for _, moved in findings):
        together.append(
            "no other parameter moved either: did the block step an optimizer, with gradients and a "
            "learning rate above 0?"
        )
    if together:
        more = f"\nand {len(together) - 10} more" * (len(together) > 10)
        raise AssertionError("\n".join(together[:10]) + more)


def _elements(model: Model, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    current, backend = resting_parameters(model)
    return ((name, backend.elements(current[name])) for name in names if name in current)


def _hashes(model: Model, selected: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Of all other parameters, tied names of selected ones left out."""
    current, backend = resting_parameters(model)
    ids = {id(current.get(name)) for name in selected}
    return {
        name: sum(int(places.sum()) for _, places in mixed_bits(backend.elements(tensor)))
        for name, tensor in current.items()
        if id(tensor) not in ids
    }


def _difference(before: torch.Tensor, now: torch.Tensor | None) -> str | None:
    if now is None:
        return "is no longer in the model"
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        return f"became {tuple(now.shape)} of {now.dtype}, from {tuple(before.shape)} of {before.dtype}"
    if torch.equal(bits(now), bits(before)):
        return None
    wide = torch.complex128 if now.is_complex() else torch.float64
    difference = (now.to(wide) - before.to(wide)).abs()
    return f"moved: largest difference {float(difference.nan_to_num(nan=float('inf')).max()):.3g}"


@contextmanager
def _after_each_step(look: Callable[[int], None]) -> Iterator[None]:
    """Call `look` with 1, 2, … after each step; the inner steps of an optimizer of optimizers are its own."""
    depth = steps = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth, steps
        depth -= 1
        if depth == 0:
            steps += 1
            look(steps)

    handles = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
