"""The guard on real ranks: what goes wrong on one rank is raised on all of them, by its name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import frozen_opt
from frozen_opt import FreezeReport
from frozen_opt.testing import assert_excluded, assert_frozen, assert_no_state, unchanged
from tests.models import Transformer, train, transformer
from tests.ranks.launch import run_ranks

PATTERNS = ["*.mlp.gate.weight", "embedding.weight"]


def sharded(*, width: int = 8) -> Transformer:
    model = transformer(width=width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def frozen_and_sharded() -> tuple[Transformer, torch.optim.Optimizer, FreezeReport]:
    model = sharded()
    report = frozen_opt.freeze_parameters(model, PATTERNS, role="policy")
    return model, torch.optim.AdamW(frozen_opt.trainable_parameters(model), weight_decay=0.1), report


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except (frozen_opt.FreezingError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def flip_one_bit(parameter: nn.Parameter) -> None:
    elements = parameter.detach()
    elements = elements.to_local() if hasattr(elements, "to_local") else elements
    elements.view(torch.int32).flatten()[-1] ^= 1


def undo_on_one_rank() -> dict[str, str]:
    last = dist.get_rank() == dist.get_world_size() - 1
    said = {}
    model, optimizer, report = frozen_and_sharded()
    before = report.fingerprint(model)
    for _ in range(2):
        train(model, optimizer, steps=1)
        report.verify(model, optimizer)
    said["trained"] = failure(lambda: report.verify(model, optimizer, fingerprint=before))
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))  # leaves gathered parameters in the tree
    said["evaluated"] = failure(lambda: report.verify(model, optimizer, fingerprint=before))
    model.reshard()

    gate = model.layers[1].mlp.gate
    if last:
        gate.weight.requires_grad_(True)
    said["flag"] = failure(lambda: report.verify(model, optimizer))
    gate.weight.requires_grad_(False)

    kept = gate.weight
    if last:
        gate.weight = nn.Parameter(kept.detach(), requires_grad=False)
    said["replaced"] = failure(lambda: report.verify(model, optimizer))
    gate.weight = kept

    if last:
        flip_one_bit(kept)
    said["flags only"] = failure(lambda: report.verify(model, optimizer))
    said["bit"] = failure(lambda: report.verify(model, fingerprint=before))
    if last:
        flip_one_bit(kept)

    halves = [torch.empty(1, 8) for _ in range(2)]
    dist.all_gather(halves, kept.detach().to_local().contiguous())
    kept.detach().to_local().copy_(halves[0 if last else 1])
    said["swapped"] = failure(lambda: report.verify(model, fingerprint=before))
    kept.detach().to_local().copy_(halves[1 if last else 0])

    if last:
        optimizer.add_param_group({"params": [kept]})
    said["optimizer"] = failure(lambda: report.verify(model, optimizer))
    return said


def test_what_one_fsdp2_rank_finds_is_raised_on_all() -> None:
    results = run_ranks(undo_on_one_rank, 2)
    assert results[0] == results[1]
    gate = "layers.1.mlp.gate.weight"
    for case, text in {
        "trained": "passed",
        "evaluated": "passed",
        "flag": f"FrozenParameterChangedError: role 'policy': {gate} can be trained again",
        "replaced": f"FrozenParameterChangedError: role 'policy': {gate} is another tensor",
        "flags only": "passed",
        "bit": f"FrozenParameterChangedError: role 'policy': the values of {gate} changed",
        "swapped": f"FrozenParameterChangedError: role 'policy': the values of {gate} changed",
        "optimizer": f"FrozenParameterInOptimizerError: role 'policy': the optimizer holds {gate}",
    }.items():
        assert results[0][case].startswith(text), case


def fingerprints() -> dict[str, Any]:
    model = sharded(width=6)  # of which 4 ranks get 2, 2, 2 and 0 rows
    report = frozen_opt.freeze_parameters(model, PATTERNS, role="policy")
    fsdp = report.fingerprint(model)

    plain = transformer(width=6)
    report = frozen_opt.freeze_parameters(plain, PATTERNS, role="policy")
    ddp = DistributedDataParallel(plain)
    replicas = report.fingerprint(ddp)
    if dist.get_rank() == 1:
        flip_one_bit(plain.embedding.weight)
    bit = failure(lambda: report.verify(ddp, fingerprint=replicas))
    others = failure(lambda: report.verify(ddp, fingerprint=fsdp))
    return {"fsdp": fsdp, "replicas": replicas, "bit": bit, "others": others}


def test_a_fingerprint_is_the_same_on_every_rank_and_holds_on_other_ranks() -> None:
    results = run_ranks(fingerprints, 4)
    assert all(result == results[0] for result in results)
    model = transformer(width=6)
    report = frozen_opt.freeze_parameters(model, PATTERNS, role="policy")
    for layout in ("fsdp", "replicas"):
        report.verify(model, fingerprint=results[0][layout])
    assert results[0]["fsdp"] != results[0]["replicas"] != report.fingerprint(model)
    for case in ("bit", "others"):
        assert "the values of embedding.weight changed" in results[0][case]
    flip_one_bit(model.layers[0].mlp.gate.weight)
    for layout in ("fsdp", "replicas"):
        text = failure(lambda layout=layout: report.verify(model, fingerprint=results[0][layout]))
        assert "the values of layers.0.mlp.gate.weight changed" in text


def zero3() -> dict[str, Any]:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    model = transformer(width=7)  # padded: 77 elements do not divide by 2
    report = frozen_opt.freeze_parameters(model, PATTERNS, role="policy")
    optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    report.verify(engine, engine)
    before = report.fingerprint(engine)
    logits = engine(torch.zeros(1, 2, dtype=torch.long))
    engine.backward(logits.square().mean())
    engine.step()
    trained = failure(lambda: report.verify(engine, engine, fingerprint=before))
    if dist.get_rank() == 1:
        flip_one_bit(engine.module.embedding.weight.ds_tensor[: 77 // 2 - 1])
    changed = failure(lambda: report.verify(engine, fingerprint=before))
    return {"before": before, "trained": trained, "changed": changed}


def test_zero3_partitions_are_read_where_they_lie() -> None:
    results = run_ranks(zero3, 2)
    assert results[0] == results[1]
    assert results[0]["trained"] == "passed"
    assert "the values of embedding.weight changed" in results[0]["changed"]
    model = transformer(width=7)
    report = frozen_opt.freeze_parameters(model, PATTERNS, role="policy")
    report.verify(model, fingerprint=results[0]["before"])


def assertions() -> dict[str, str]:
    last = dist.get_rank() == 1
    model, optimizer, _ = frozen_and_sharded()
    gate = model.layers[1].mlp.gate.weight

    def nudge(parameter: nn.Parameter, *, on_this_rank: bool) -> None:
        with unchanged(model, PATTERNS):
            train(model, optimizer, steps=1)
            if on_this_rank:
                parameter.detach().to_local()[-1, -1] += 0.5

    def train_elsewhere() -> None:
        with unchanged(model, PATTERNS):
            if last:
                model.head.weight.detach().to_local()[-1, -1] += 0.5

    def stand_still() -> None:
        with unchanged(model, PATTERNS):
            optimizer.zero_grad()

    said = {
        "passes": failure(lambda: nudge(gate, on_this_rank=False)),
        "excluded": failure(lambda: assert_excluded(optimizer, model, PATTERNS)),
        "no state": failure(lambda: assert_no_state(optimizer, model, PATTERNS)),
        "moved": failure(lambda: nudge(gate, on_this_rank=last)),
        "elsewhere": failure(train_elsewhere),
        "still": failure(stand_still),
    }
    gate.requires_grad_(last)
    said["flag"] = failure(lambda: assert_frozen(model, PATTERNS))
    gate.requires_grad_(False)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))  # leaves gathered parameters in the tree
    said["gathered"] = failure(lambda: assert_excluded(optimizer, model, ["head.weight"]))
    return said


def test_assertions_fail_on_every_rank_where_one_has_cause() -> None:
    results = run_ranks(assertions, 2)
    assert results[0] == results[1]
    gate = "layers.1.mlp.gate.weight"
    assert results[0] == {
        "passes": "passed",
        "excluded": "passed",
        "no state": "passed",
        "moved": (
            f"AssertionError: rank 1: {gate} moved: largest difference 0.5 (seen at the end of the block)"
        ),
        "elsewhere": "passed",
        "still": results[0]["still"],
        "flag": f"AssertionError: {gate} requires a gradient",
        "gathered": "AssertionError: the optimizer holds head.weight",
    }
    assert results[0]["still"].startswith("AssertionError: no other parameter moved either")
