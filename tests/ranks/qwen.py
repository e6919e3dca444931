"""A tiny Qwen3-MoE, one list of patterns, and three training steps whose outcome is told as plain data.

What a backend does with the model is compared with `reference()`: the same freeze and the same data, in one
process, with nothing around the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frozen_opt import named_parameters, with_freezing
from frozen_opt.optimizers_by_name import build_optimizer
from tests.versions import FUSED_EXPERTS

PATTERNS = ["*.mlp.gate.weight", "model.layers.0.*", "!model.layers.0.self_attn.[qk]_*"]
"""Both routers, and of layer 0 all but the query and key side of its attention."""

FROZEN = 8 if FUSED_EXPERTS else 18
"""How many parameters that is."""

OPTIMIZER = {"optimizer": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "adam_betas": (0.9, 0.99)}
CONFIG = {"trainer": {"policy": {"freeze_parameters": PATTERNS, "optimizer_config": OPTIMIZER}}}


def build_plain(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    return build_optimizer(model, config["trainer"]["policy"])


build_policy_optimizer = with_freezing("policy")(build_plain)


def build(**changes: Any) -> nn.Module:
    """The model; every call and every rank gets the same weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(
        vocab_size=64,
        num_hidden_layers=2,
        use_cache=False,
        initializer_range=0.2,
        **sizes,
        **heads,
        **changes,
    )
    return Qwen3MoeForCausalLM(config)


def tokens() -> torch.Tensor:
    """The whole batch; data-parallel ranks share it out evenly."""
    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))


def my_tokens(rank: int, size: int) -> torch.Tensor:
    return tokens().chunk(size)[rank]


class HFModelWrapper(nn.Module):
    """What MarinSkyRL puts around a model, under the name by which frozen_opt knows it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


HFModelWrapper.__module__ = "skyrl_train.model_wrapper"
HFModelWrapper.__qualname__ = "HFModelWrapper"


@dataclass
class Run:
    """What three steps did. Names are canonical."""

    names: tuple[str, ...] = ()
    """What the report says is frozen."""
    elements: int = 0
    names_now: tuple[str, ...] = ()
    """What a plan says after the steps, on the model as it is wrapped by then."""
    elements_now: int = 0
    backend: str = ""
    changed: list[str] = field(default_factory=list)
    """Parameters that are no longer bit-identical, gathered in full."""
    losses: list[float] = field(default_factory=list)
    """Before each step, over the whole batch."""
    with_gradient: list[str] = field(default_factory=list)
    with_state: list[str] = field(default_factory=list)


@contextmanager
def in_full(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Every parameter by canonical name, gathered in full. All ranks must call."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    parameters = dict(named_parameters(model))
    gathering: Any = nullcontext()
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        gathering = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    elif any(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        import deepspeed

        gathering = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with gathering:
        yield {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in ((name, value.detach()) for name, value in named_parameters(model))
        }


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    with in_full(model) as values:
        return {name: value.cpu().clone() for name, value in values.items()}


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    data: tuple[int, int] = (0, 1),
    start: dict[str, torch.Tensor] | None = None,
    engine: Any = None,
) -> Run:
    """Three steps on this rank's share of the batch.

    Args:
        model: Frozen already, ready to train.
        optimizer: Its optimizer.
        data: Data-parallel rank and size.
        start: The weights to compare with; by default those that the model has now.
        engine: DeepSpeed's, which does the backward and the optimizer's step.
    """
    start = start or snapshot(model)
    run = Run()
    mine = my_tokens(*data)
    for _ in range(3):
        loss = model(input_ids=mine, labels=mine).loss
        engine.backward(loss) if engine else loss.backward()
        run.with_gradient = [name for name, p in named_parameters(model) if p.grad is not None]
        (engine or optimizer).step()
        if not engine:
            optimizer.zero_grad()
        total = loss.detach().float().clone()
        if data[1] > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        run.losses.append(total.item())
    run.with_state = [name for name, p in named_parameters(model) if p in optimizer.state]
    with in_full(model) as now:
        run.changed = [name for name, value in now.items() if not torch.equal(value.cpu(), start[name])]
    return run


def freeze_by_hand(model: nn.Module, patterns: list[str] = PATTERNS) -> None:
    """What the patterns say, with nothing of frozen_opt."""
    for name, parameter in model.named_parameters():
        for pattern in patterns:
            if fnmatchcase(name, pattern.removeprefix("!")):
                parameter.requires_grad_(pattern.startswith("!"))


def reference(
    patterns: list[str] = PATTERNS,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: build_optimizer(
        model, {"optimizer_config": OPTIMIZER}
    ),
) -> Run:
    """The run in one process, frozen by hand, so that nothing of the freeze is frozen_opt's."""
    model = build()
    freeze_by_hand(model, patterns)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    start = snapshot(model)
    run = train(model, optimizer(model), start=start)
    run.names, run.elements = tuple(frozen), sum(parameter.numel() for parameter in frozen.values())
    return run
