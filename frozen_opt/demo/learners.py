"""The roles: a Qwen3-MoE policy and its critic, each with an optimizer of which parts are frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeModel

import frozen_opt
from frozen_opt.backends.bits import bits
from frozen_opt.commands.bad_input import BadInput
from frozen_opt.demo.backends import STRATEGIES, Wrapped, rank_and_size, rebuild
from frozen_opt.parameters import resting_parameters
from frozen_opt.ranks import collectives


@dataclass
class Learner:
    """One role: its model, its optimizer, and what the closing table compares them with."""

    role: str
    wrapped: Wrapped
    start: dict[str, Tensor]
    """Values of the parameters when training began; of what was frozen later, when it was."""
    state_bytes_unfrozen: int
    astray: list[str] = field(default_factory=list)
    """What moved while an earlier list froze it."""

    @property
    def model(self) -> nn.Module:
        return self.wrapped.model

    @property
    def optimizer(self) -> Any:
        return self.wrapped.optimizer


class Critic(nn.Module):
    """The policy's body with a value head, as SkyRL builds it: a value for each token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = Qwen3MoeModel(config)
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        values: Tensor = self.value_head(self.model(tokens).last_hidden_state)
        return values


def make_learners(config: Any) -> dict[str, Learner]:
    """The roles that the config has, by name.

    Raises:
        BadInput: torch or transformers refuse the settings.
        FreezingError: frozen_opt does.
    """
    frozen_opt.reset()  # or a critic of an earlier run in this process would stay in the metrics
    try:
        torch.manual_seed(config.trainer.seed)
        sizes = Qwen3MoeConfig(
            **config.model,
            vocab_size=config.environment.digits + 1,  # and the separator
            max_position_embeddings=2 * config.environment.length + 1,
            use_cache=False,
        )
        models = {"policy": Qwen3MoeForCausalLM(sizes)}
        if config.trainer.critic is not None:
            models["critic"] = Critic(sizes)
        learners = {role: make_learner(role, model, config) for role, model in models.items()}
    except (BadInput, frozen_opt.FreezingError):
        raise
    except Exception as error:  # whatever torch and transformers have against a setting
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise BadInput(f"no model and optimizer can be made of these settings: {reason}") from error
    if rank := rank_and_size()[0]:
        torch.manual_seed(config.trainer.seed + rank)  # the weights are the same, the samples are not
    return learners


def make_learner(role: str, model: nn.Module, config: Any) -> Learner:
    """Wrap the model, and build its optimizer with the role's parameters frozen."""
    model = model.to(config.trainer.device)
    wrap, node = STRATEGIES[config.trainer.strategy], config.trainer[role]
    state_bytes_unfrozen = measure_unfrozen(wrap(copy.deepcopy(model), node))
    wrapped: Wrapped = frozen_opt.with_freezing(role)(wrap)(model, node)
    start = {name: tensor.clone() for name, tensor in elements(wrapped.model).items()}
    return Learner(role, wrapped, start, state_bytes_unfrozen)


def change_list(learner: Learner, patterns: Sequence[str], node: Any) -> None:
    """Go on with another freeze list: the factory again, and the state moved by name."""
    learner.astray += moved(learner, frozen=True)
    before, frozen = learner.optimizer, frozen_opt.report(learner.role).names
    node = OmegaConf.merge(node, {"freeze_parameters": patterns})
    learner.wrapped = frozen_opt.with_freezing(learner.role, model="wrapped.model")(rebuild)(
        learner.wrapped, node
    )
    state = frozen_opt.migrate_optimizer_state(before, learner.optimizer, learner.model)
    learner.optimizer.load_state_dict(state)
    now = elements(learner.model)
    for name in set(frozen_opt.report(learner.role).names).difference(frozen):
        learner.start[name] = now[name].clone()


def elements(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> this rank's part of each parameter."""
    parameters, backend = resting_parameters(model)
    return {name: backend.elements(parameter) for name, parameter in parameters.items()}


def measure_unfrozen(twin: Wrapped) -> int:
    """Bytes of optimizer state had nothing been frozen, by a step with a copy of the model.

    Running the copy first finds sizes that don't fit each other before training starts.
    """
    output: Any = twin.model(torch.zeros(1, 2, dtype=torch.long, device=next(twin.model.parameters()).device))
    twin.descend(0 * getattr(output, "logits", output).sum())
    return state_bytes(twin.optimizer)


def state_bytes(optimizer: Any) -> int:
    """Bytes of all tensors in the optimizer's state, on all ranks together."""
    tensors = [
        value.to_local() if hasattr(value, "to_local") else value  # a DTensor's shard
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return int(collectives.add_up(torch.tensor(sum(tensor.nbytes for tensor in tensors)), None))


def moved(learner: Learner, *, frozen: bool) -> list[str]:
    """Which of the frozen parameters, or of the others, are not bit for bit what they were on some rank."""
    names = set(frozen_opt.report(learner.role).names)
    now = elements(learner.model)
    changed = [not torch.equal(bits(now[name]), bits(start)) for name, start in learner.start.items()]
    counts = collectives.add_up(torch.tensor(changed, dtype=torch.int64), None).tolist()
    return [name for name, count in zip(now, counts, strict=True) if count and (name in names) == frozen]
