"""Thawing on real ranks: what trains right afterwards, and what is refused, since it would not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import frozen_opt
from frozen_opt import migrate_optimizer_state, with_freezing
from tests.models import Transformer, snapshot, train, transformer
from tests.planning import test_change_list
from tests.ranks.launch import run_ranks
from tests.ranks.test_offload import fsdp2, tensor_parallel, whole
from tests.versions import MUON, needs_hsdp_on_cpu

LISTS = [["*.gate.weight", "*.attention.weight"], ["layers.0.*"], []]


def hsdp() -> Transformer:
    model = transformer()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1() -> nn.Module:
    """Wrapped while whole units were frozen: FSDP1 asks its original parameters anew at each forward."""
    model = transformer()
    frozen_opt.freeze_parameters(model, ["layers.*"], role="policy")
    cpu = torch.device("cpu")
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, use_orig_params=True, device_id=cpu)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01, weight_decay=0.1)


def through_the_lists(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The whole weights after two steps under each list."""
    found = []
    for patterns in LISTS:
        optimizer = with_freezing("policy", patterns=patterns)(adamw)(model)
        train(model, optimizer, steps=2)
        optimizer.zero_grad()
        frozen_opt.report("policy").verify(model, optimizer)
        if isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model):
                found.append(whole(model))
        else:
            found.append(whole(model))
    return found


def sharded_run(build: Any) -> list[dict[str, torch.Tensor]]:
    return through_the_lists(build())


@pytest.mark.parametrize(
    ("build", "ranks"),
    [(fsdp2, 2), pytest.param(hsdp, 4, marks=needs_hsdp_on_cpu), (tensor_parallel, 2), (fsdp1, 2)],
)
def test_sharded_models_train_what_thaws_as_one_process_does(build: Any, ranks: int) -> None:
    expected = through_the_lists(transformer())
    for found in run_ranks(sharded_run, ranks, build, timeout=120):
        for weights, theirs in zip(found, expected, strict=True):
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def changes_by_hand_and_by_list(name: str) -> None:
    test_change_list.compare(name, fsdp2)


# torch's Adafactor does not step DTensors.
@pytest.mark.parametrize("name", ["AdamW", "SGD", MUON])
def test_three_changes_on_fsdp2_are_those_of_a_run_by_hand(name: str) -> None:
    run_ranks(changes_by_hand_and_by_list, 2, name, timeout=120)


def drifting(refused: bool) -> list[torch.Tensor]:
    """A DDP over a frozen layer that is thawed then; each rank has data of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen_opt.freeze_parameters(net, ["0.*"], role="policy")
    ddp = DistributedDataParallel(net)
    for model in (ddp, net):  # the inside as well
        with pytest.raises(
            frozen_opt.UnsupportedBackendError, match=r"laid out without 0\.weight, which the list"
        ):
            frozen_opt.freeze_parameters(model, ["0.bias"], role="policy")
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
    if refused:
        del ddp  # as the error says: out of DDP, the new list, DDP anew
        frozen_opt.freeze_parameters(net, ["0.bias"], role="policy")
        ddp = DistributedDataParallel(net)
    else:
        net[0].weight.requires_grad_(True)  # what the refusal prevents
    optimizer = torch.optim.SGD(frozen_opt.trainable_parameters(net), lr=0.1)
    ddp(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def test_case_33_ddp_cannot_thaw_and_without_the_refusal_ranks_drift_apart() -> None:
    for refused in (True, False):
        first, second = run_ranks(drifting, 2, refused, timeout=60)
        same = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
        assert same == [refused, True, True, True]


def late_ddp() -> None:
    """What was frozen after DDP had laid itself out for it has its place."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    frozen_opt.freeze_parameters(ddp, ["0.*"], role="policy")
    frozen_opt.freeze_parameters(ddp, ["0.bias"], role="policy")
    optimizer = torch.optim.SGD(frozen_opt.trainable_parameters(net), lr=0.1)
    for step in range(3):
        ddp(torch.full((2, 4), float(dist.get_rank() + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(weights, net[0].weight.detach())
    assert torch.equal(*weights)


def test_what_ddp_has_a_place_for_thaws_and_is_averaged() -> None:
    run_ranks(late_ddp, 2, timeout=60)


FORMS = {"nested": StateDictOptions(), "flattened": StateDictOptions(flatten_optimizer_state_dict=True)}
THEN, NOW = LISTS[0], ["layers.1.mlp.gate.weight", "embedding.weight"]


def save(folder: str, form: str) -> dict[str, torch.Tensor]:
    model = fsdp2()
    optimizer = with_freezing("policy", patterns=THEN)(adamw)(model)
    train(model, optimizer, steps=2)
    dcp.save(
        {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FORMS[form]),
        },
        checkpoint_id=folder,
    )
    return moments(model, optimizer)


def moments(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        name: optimizer.state[parameter]["exp_avg"].full_tensor().clone()
        for name, parameter in frozen_opt.named_parameters(model)
        if parameter in optimizer.state
    }


def load(folder: str, form: str) -> tuple[Any, Any, set[str]]:
    """Under the same list, then under another one, on other ranks than saved it."""
    model = fsdp2()
    optimizer = with_freezing("policy", patterns=THEN)(adamw)(model)
    weights, state = model.state_dict(), get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, state, options=FORMS[form])
    same = moments(model, optimizer)
    before, optimizer = optimizer, with_freezing("policy", patterns=NOW)(adamw)(model)
    with pytest.raises(frozen_opt.ResumeMismatchError):
        optimizer.load_state_dict(before.state_dict())
    optimizer.load_state_dict(migrate_optimizer_state(before.state_dict(), optimizer, model))
    other = moments(model, optimizer)
    train(model, optimizer, steps=1)
    return same, other, set(moments(model, optimizer))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [(2, 3), (2, 1)])
def test_case_34_states_load_and_move_on_another_number_of_ranks(
    tmp_path: Path, ranks: tuple[int, int], form: str
) -> None:
    then, now = ranks
    saved, *_ = run_ranks(save, then, str(tmp_path / "checkpoint"), form, timeout=60)
    everything = set(snapshot(transformer()))
    trained_now = everything - {"layers.1.mlp.gate.weight", "embedding.weight"}
    for same, other, trained in run_ranks(load, now, str(tmp_path / "checkpoint"), form, timeout=60):
        assert same.keys() == saved.keys()
        assert all(torch.equal(same[name], saved[name]) for name in saved)
        assert other.keys() == saved.keys() & trained_now
        assert all(torch.equal(other[name], saved[name]) for name in other)
        assert trained == trained_now


def fsdp1_start(patterns: list[str]) -> tuple[Any, Any]:
    frozen_opt.reset()
    model = FullyShardedDataParallel(transformer(), use_orig_params=True, device_id=torch.device("cpu"))
    return model, with_freezing("policy", patterns=patterns)(adamw)(model)


def shards(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """This rank's first moments."""
    return {
        name: optimizer.state[parameter]["exp_avg"].clone()
        for name, parameter in frozen_opt.named_parameters(model)
        if parameter in optimizer.state
    }


def fsdp1_resume(now: list[str]) -> tuple[set[str], set[str]]:
    model, optimizer = fsdp1_start(THEN)
    train(model, optimizer, steps=2)
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    to_load = FullyShardedDataParallel.optim_state_dict_to_load

    model, before = fsdp1_start(THEN)
    before.load_state_dict(to_load(model, before, saved))
    loaded = shards(model, before)
    other, optimizer = fsdp1_start(now)
    with pytest.raises((KeyError, RuntimeError, frozen_opt.ResumeMismatchError)):  # the first two are torch's
        optimizer.load_state_dict(to_load(other, optimizer, saved))
    if set(now) > set(THEN):
        model = other
        optimizer.load_state_dict(to_load(model, optimizer, migrate_optimizer_state(saved, optimizer, model)))
    else:
        with pytest.raises(frozen_opt.UnsupportedBackendError, match=r"was frozen then: build the optimizer"):
            migrate_optimizer_state(saved, optimizer, other)
        state, optimizer = before.state_dict(), with_freezing("policy", patterns=now)(adamw)(model)
        optimizer.load_state_dict(migrate_optimizer_state(state, optimizer, model))
    kept = shards(model, optimizer)
    assert all(torch.equal(shard, loaded[name]) for name, shard in kept.items())
    train(model, optimizer, steps=1)
    return set(loaded), set(kept)


@pytest.mark.parametrize("now", [[*THEN, "embedding.weight"], NOW, ["*.gate.weight"]])
def test_case_34_fsdp1_states_tell_their_list_and_move(now: list[str]) -> None:
    frozen_opt.reset()
    frozen = set(frozen_opt.plan_freezing(transformer(), now, role="policy").names)
    for loaded, kept in run_ranks(fsdp1_resume, 2, now, timeout=60):
        assert kept == loaded - frozen  # of what this rank has a part of
        assert kept
