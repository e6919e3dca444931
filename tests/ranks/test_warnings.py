"""What surprises on torch surprises on FSDP and DeepSpeed as well, and is warned of there too."""

from typing import Any

import pytest
from loguru import logger
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import frozen_opt
from tests.backends.test_buffers import Router
from tests.models import transformer
from tests.ranks.launch import run_ranks


def freeze_a_router(backend: str) -> list[str]:
    warnings: list[str] = []
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    model: Any = nn.Sequential(Router(), nn.BatchNorm1d(8), nn.Linear(8, 8))
    if backend == "fsdp":
        for part in model:
            fully_shard(part)
    else:
        import deepspeed

        deepspeed.zero.Init(module=model, remote_device="cpu", config_dict_or_path={"train_batch_size": 1})
    frozen_opt.freeze_parameters(model, ["0.*", "1.*"], role="policy")
    return warnings


def freeze_embeddings_under_reentrant_checkpointing(backend: str) -> tuple[str, list[str]]:
    warnings: list[str] = []
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    model: Any = transformer()
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
    if backend == "fsdp":
        fully_shard(model)
    else:
        import deepspeed

        deepspeed.zero.Init(module=model, remote_device="cpu", config_dict_or_path={"train_batch_size": 1})
    report = frozen_opt.freeze_parameters(model, ["embedding.weight"], role="policy")
    return report.backend, warnings


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_case_15_on_sharded_models(backend: str) -> None:
    ((recognised, warnings),) = run_ranks(freeze_embeddings_under_reentrant_checkpointing, 1, backend)
    assert recognised == backend
    assert len(warnings) == 1
    assert "use_reentrant=False" in warnings[0]


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_case_38_on_sharded_models(backend: str) -> None:
    (warnings,) = run_ranks(freeze_a_router, 1, backend)
    assert len(warnings) == 2
    assert "statistics of 1 are" in " ".join(warnings)
    assert "buffers expert_bias, tokens_per_expert of" in " ".join(warnings)
