"""Megatron-FSDP for real, on CPU and gloo: what was frozen before it wraps stays; later is refused."""

import contextlib
from typing import Any

import pytest
import torch

import frozen_opt
from frozen_opt import named_parameters, with_freezing
from frozen_opt.backends.optimizer_search import find_optimizers
from frozen_opt.optimizers_by_name import build_megatron_optimizer
from tests.ranks.launch import run_ranks
from tests.ranks.megatron_cpu import LENGTH, Layout, batches, meshes_on_cpu
from tests.versions import MEGATRON

pytestmark = pytest.mark.xdist_group("megatron")

PATTERNS = ["*.linear_proj.weight", "decoder.layers.2.*", "embedding.*"]
SETTINGS = {"optimizer": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.0}


def takes_frozen() -> contextlib.AbstractContextManager[Any]:
    """Megatron-FSDP takes frozen parameters since 0.17, and says of a hook that it can't be before."""
    if MEGATRON >= (0, 17):
        return contextlib.nullcontext()
    return pytest.raises(AssertionError, match="hook on a tensor that doesn't require gradient")


def wrap(chunk: Any, strategy: str) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    meshes_on_cpu()
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        gradient_reduce_div_fusion=False,  # of NCCL alone
        overlap_grad_reduce=True,
    )
    return FullyShardedDataParallel(chunk.config, settings, chunk, device=torch.device("cpu"))


def train(strategy: str) -> tuple[set[str], set[str]]:
    """The names that move, by this rank's shards, and those that should."""
    layout = Layout(dp=2, experts=None)
    (chunk,), (bare,) = layout.chunks(), layout.chunks()
    names = frozen_opt.freeze_parameters(bare, PATTERNS, role="bare").names
    twin = torch.optim.AdamW(frozen_opt.trainable_parameters(bare), lr=1e-2, weight_decay=0.1)
    frozen_opt.freezing_hook("policy", PATTERNS)([chunk])
    model = wrap(chunk, strategy)
    factory = with_freezing("policy", patterns=PATTERNS)(build_megatron_optimizer)
    optimizer = factory([model], {"optimizer_config": SETTINGS})
    report = frozen_opt.report("policy")
    assert report.names == names
    assert report.element_count == frozen_opt.report("bare").element_count

    checksums = report.fingerprint([model])
    before = {name: value.to_local().clone() for name, value in named_parameters([model])}
    for step in range(3):
        tokens = batches(step)[0]
        model.zero_grad_buffer()
        losses = []
        for one in (model, bare):
            loss = one(tokens, torch.arange(LENGTH)[None], None, labels=tokens.roll(1, -1)).mean()
            loss.backward()
            losses.append(loss.item())
        model.finish_grad_sync()
        for one in (optimizer, twin):
            one.step()
            one.zero_grad()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        report.verify([model], optimizer)
    report.verify([model], optimizer, fingerprint=checksums)
    if strategy == "optim_grads_params":  # since a step
        with pytest.raises(frozen_opt.UnsupportedBackendError, match="synchronize_param_gather"):
            factory([model], {"optimizer_config": SETTINGS})
    model.synchronize_param_gather()
    assert frozen_opt.report("policy") == report
    factory([model], {"optimizer_config": SETTINGS})
    parameters = dict(named_parameters([model]))
    held = {id(parameter) for _, parameters in find_optimizers(optimizer) for parameter in parameters}
    assert {
        name for name, parameter in parameters.items() if id(parameter) in held
    } == parameters.keys() - names
    stated = set(map(id, optimizer.optimizer.state))
    assert {name for name, parameter in parameters.items() if id(parameter) in stated} == {
        name
        for name, parameter in parameters.items()
        if id(parameter) in held and parameter.to_local().numel()  # this rank may have no element of it
    }
    moved = {name for name, value in parameters.items() if not torch.equal(value.to_local(), before[name])}
    return moved, before.keys() - names


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_what_was_frozen_before_it_wraps_stays(strategy: str) -> None:
    with takes_frozen():
        (moved, trainable), (others, _) = run_ranks(train, 2, strategy)
        assert moved | others == trainable


def refuse_late(strategy: str, bare: bool) -> tuple[str, bool]:
    (chunk,) = Layout(dp=2, experts=None).chunks()
    model = wrap(chunk, strategy)
    before = [(name, parameter.requires_grad) for name, parameter in named_parameters([model])]
    with pytest.raises(frozen_opt.UnsupportedBackendError) as refusal:
        frozen_opt.freeze_parameters([chunk if bare else model], ["output_layer.weight"], role="policy")
    after = [(name, parameter.requires_grad) for name, parameter in named_parameters([model])]
    return str(refusal.value), before == after


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_a_freeze_after_it_wrapped_is_refused(strategy: str, bare: bool) -> None:
    texts, untouched = zip(*run_ranks(refuse_late, 2, strategy, bare), strict=True)
    assert all("output_layer.weight has a place in its gradient buffers" in text for text in texts)
    assert all("from megatron-core 0.17 on" in text for text in texts)
    assert all(untouched)


def refuse_to_thaw() -> str:
    (chunk,) = Layout(dp=2, experts=None).chunks()
    frozen_opt.freeze_parameters([chunk], ["output_layer.weight", "embedding.*"], role="policy")
    model = wrap(chunk, "optim_grads_params")
    with pytest.raises(frozen_opt.UnsupportedBackendError) as refusal:
        frozen_opt.freeze_parameters([model], ["output_layer.weight"], role="policy")
    assert frozen_opt.report("policy").patterns == ("output_layer.weight", "embedding.*")
    return str(refusal.value)


def test_what_it_wrapped_frozen_does_not_thaw() -> None:
    with takes_frozen():
        texts = run_ranks(refuse_to_thaw, 2)
        assert all("embedding.word_embeddings.weight" in text for text in texts)
        assert all("wrap them anew" in text for text in texts)
