"""Quantized weights on real ranks: bitsandbytes shards with FSDP2; torchao's inference weights do not."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import frozen_opt
from frozen_opt import trainable_parameters, with_freezing
from tests.ranks.launch import run_ranks
from tests.versions import needs_quantized_shards


def train_sharded(kind: str, settings: dict[str, Any]) -> dict[str, int]:
    import bitsandbytes

    torch.manual_seed(0)
    layer = getattr(bitsandbytes.nn, kind)(64, 64, **settings).to("cpu")
    model = nn.Sequential(layer, nn.Linear(64, 8))
    mesh = init_device_mesh("cpu", (2,))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = with_freezing("policy", patterns=["0.*"])(
        lambda model: torch.optim.AdamW(trainable_parameters(model), weight_decay=0.1)
    )(model)
    report = frozen_opt.report("policy")
    checksums = report.fingerprint(model)
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    report.verify(model, optimizer, fingerprint=checksums)
    model[0].weight.to_local().view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(frozen_opt.FrozenParameterChangedError, match=r"values of 0\.weight"):
        report.verify(model, optimizer, fingerprint=checksums)
    return report.metrics()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Linear4bit", {"quant_type": "nf4", "quant_storage": torch.bfloat16}),
        pytest.param("Linear4bit", {"quant_type": "nf4"}, marks=needs_quantized_shards),
        pytest.param("Linear8bitLt", {"has_fp16_weights": False}, marks=needs_quantized_shards),
    ],
    ids=["nf4 in bf16", "nf4", "int8"],
)
def test_case_37_sharded_by_fsdp2(kind: str, settings: dict[str, Any]) -> None:
    metrics = {"policy/frozen_parameter_count": 2, "policy/frozen_element_count": 64 * 64 + 64}
    assert run_ranks(train_sharded, 2, kind, settings) == [metrics] * 2
