"""After one full sync, an inference engine needs no more than the trainable parameters."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import frozen_opt
from tests.models import train, transformer
from tests.ranks.launch import run_ranks


def sync() -> dict[str, Any]:
    model = transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    frozen_opt.freeze_parameters(model, ["*.mlp.gate.weight", "embedding.weight"], role="policy")
    optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01, weight_decay=0.1)

    everything = transformer(seed=1)  # two engines, with other weights to begin with
    trainable_only = transformer(seed=1)
    compiled = torch.compile(model)  # never run: only its names matter

    def send(engine: torch.nn.Module, parameters: list[tuple[str, torch.nn.Parameter]]) -> list[str]:
        weights = {name: parameter.detach().full_tensor() for name, parameter in parameters}
        engine.load_state_dict(weights, strict=False)
        return list(weights)

    send(everything, list(frozen_opt.named_parameters(compiled)))
    send(trainable_only, list(frozen_opt.named_parameters(compiled)))
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(2))
    equal, differs = [], []
    for _ in range(3):
        before = trainable_only(tokens)
        train(model, optimizer, steps=1)
        send(everything, list(frozen_opt.named_parameters(compiled)))
        sent = send(trainable_only, frozen_opt.trainable_named_parameters(compiled))
        one, other = everything.state_dict(), trainable_only.state_dict()
        equal.append(all(torch.equal(one[name], other[name]) for name in one))
        equal.append(torch.equal(everything(tokens), trainable_only(tokens)))
        differs.append(not torch.equal(before, trainable_only(tokens)))
    return {"equal": equal, "differs": differs, "sent": sent}


def test_trainable_syncs_after_a_full_one_equal_full_syncs() -> None:
    results = run_ranks(sync, 2)
    model = transformer()
    frozen_opt.freeze_parameters(model, ["*.mlp.gate.weight", "embedding.weight"], role="policy")
    for result in results:
        assert result["equal"] == [True] * 6
        assert result["differs"] == [True] * 3
        assert result["sent"] == [name for name, _ in frozen_opt.trainable_named_parameters(model)]
