"""`frozen-opt demo`: a small, real RL run, with a freeze that is checked when it ends.

A Qwen3-MoE policy learns by PPO to sort (copy, reverse) a few digits; a critic, the same body with a value
head, estimates the reward for GAE. demo.yaml says what is frozen, and everything else.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.distributions import Categorical
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeModel

import frozen_opt
from frozen_opt import ranks
from frozen_opt.headers import BadInput
from frozen_opt.shards import bits, resting_parameters
from frozen_opt.sources import first_line
from frozen_opt.strategies import STRATEGIES, Wrapped, average, launched, rank_and_size, rebuild
from frozen_opt.yaml_input import check_interpolations, check_size, explain

TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda questions: questions,
    "reverse": lambda questions: questions.flip(1),
    "sort": lambda questions: questions.sort(dim=1).values,
}


def run(overrides: Sequence[str], out: Path) -> bool:
    """Train as the config says, and show it; True if no frozen tensor moved.

    Raises:
        BadInput: An override is malformed, unknown, of the wrong type, or gives no model or optimizer.
        FreezingError: The freeze is refused.
        OSError: `out` can't be written.
    """
    config = load_config(overrides)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower shared out
    try:
        with launched(config):
            return train(config, out)
    finally:
        torch.set_num_threads(threads)


def train(config: Any, out: Path) -> bool:
    """Build both roles, train them, and compare their weights with what they were.

    Every rank does the same, since much of it is done together; the first alone is heard.
    """
    learners = make_learners(config)
    rank, _ = rank_and_size()
    console = Console(quiet=rank > 0)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    with (
        Path(os.devnull if rank else out / "metrics.jsonl").open("w", encoding="utf-8") as file,
        progress(config.trainer.steps, console) as show,
    ):
        for step in range(1, config.trainer.steps + 1):
            for role, node in _nodes(config).items():
                if (patterns := _schedule(node).get(step)) is not None:
                    change_list(learners[role], patterns, node)
            try:
                metrics = {"step": step, **ppo_step(**learners, config=config), **frozen_opt.metrics()}
            except FloatingPointError as error:
                raise BadInput(f"training diverged in step {step}: lower the learning rates") from error
            print(json.dumps(metrics), file=file, flush=True)
            show(metrics)
    for learner in learners.values():
        console.print(summary(learner))
    console.print(f"metrics of each step: {file.name}", markup=False, highlight=False, soft_wrap=True)
    return not any(learner.astray + moved(learner, frozen=True) for learner in learners.values())


# The config


def load_config(overrides: Sequence[str]) -> Any:
    """demo.yaml with the overrides: each key must be there already, each value be of the type it has there.

    Raises:
        BadInput: It isn't so.
    """
    default = OmegaConf.load(Path(__file__).with_name("demo.yaml"))
    OmegaConf.set_struct(default, True)  # refuses unknown keys
    for role in ("policy", "critic"):
        OmegaConf.set_struct(default.trainer[role].optimizer_config.optimizer_kwargs, False)
        OmegaConf.set_struct(default.trainer[role].freeze_schedule, False)
    for override in overrides:
        _merge(default, [override])  # each alone first, for a message that names it
    config = _merge(default, overrides)
    _check(OmegaConf.to_container(config, resolve=True), OmegaConf.to_container(default))
    for key, known in (("environment.env_class", TASKS), ("trainer.strategy", STRATEGIES)):
        if (name := OmegaConf.select(config, key)) not in known:
            raise BadInput(f"{key} is {name!r}, not one of {[*known]}")
    if config.trainer.strategy not in ("torch", "fsdp2") and any(map(_schedule, _nodes(config).values())):
        raise BadInput(
            f"trainer.strategy={config.trainer.strategy} can't train what its first list froze: a "
            "freeze_schedule is for torch and fsdp2"
        )
    return config


def _nodes(config: Any) -> dict[str, Any]:
    """The settings of each role that there is."""
    return {role: config.trainer[role] for role in ("policy", "critic") if config.trainer[role] is not None}


def _schedule(node: Any) -> dict[int, list[str]]:
    """Step -> the list from that step on."""
    schedule: Any = OmegaConf.to_container(node.freeze_schedule)
    return dict(schedule)


def _merge(default: Any, overrides: Sequence[str]) -> Any:
    text = " ".join(overrides)[:200]
    if not all("=" in override for override in overrides):
        raise BadInput(f"malformed override {text!r}: write key=value, as in trainer.steps=30")
    values = [override.partition("=")[2] for override in overrides]
    try:
        for value in values:
            check_size(value)
        config = OmegaConf.merge(default, OmegaConf.from_dotlist(list(overrides)))
        check_interpolations(OmegaConf.to_container(config))
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except ConfigKeyError as error:
        raise BadInput(f"unknown key in {text!r}: {first_line(error)}") from error
    except Exception as error:  # OmegaConf's, YAML's, ANTLR's
        raise BadInput(
            f"malformed override {text!r}: {explain(error, values[0])}\n"
            """Values are YAML, so quote patterns: 'trainer.policy.freeze_parameters=["*.mlp.gate.weight"]'"""
        ) from error
    return config


def _check(value: Any, default: Any, key: str = "") -> None:
    """That a value is of its default's type, and a number no less than it may be."""
    name = key.rpartition(".")[2]
    if name == "freeze_parameters" or (name == "critic" and value is None):
        return  # frozen_opt checks patterns
    if name == "freeze_schedule":
        steps = [*value] if isinstance(value, dict) else [0]
        if not all(type(step) is int and step > 1 for step in steps):
            raise BadInput(f"{key} is {value!r}, and must map steps from 2 on to lists, such as {{30: []}}")
        return
    kind: Any = int | float if isinstance(default, float) else type(default)
    if not isinstance(value, kind) or isinstance(value, bool):  # no key is a switch, and True is an int
        example = "" if isinstance(default, dict) else f", such as {default!r}"
        raise BadInput(f"{key} is {value!r}, and must be of type {type(default).__name__}{example}")
    lowest = 0 if name == "seed" or isinstance(default, float) else 1
    if isinstance(default, int | float) and not value >= lowest:
        raise BadInput(f"{key} is {value!r}, and must be {lowest} or more")
    if isinstance(default, dict):
        for child in default:
            _check(value[child], default[child], f"{key}.{child}".lstrip("."))


# The models and their optimizers


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
    return int(ranks.add_up(torch.tensor(sum(tensor.nbytes for tensor in tensors)), None))


# The RL


@dataclass
class Batch:
    """Questions with sampled answers, and what PPO learns from them; all but `tokens` a value a token."""

    tokens: Tensor
    answers: Tensor
    log_probs: Tensor
    right: Tensor
    advantages: Tensor
    returns: Tensor


def ppo_step(policy: Learner, critic: Learner | None = None, *, config: Any) -> dict[str, float]:
    """Sample answers, then improve policy and critic on them; the step's metrics."""
    batch = collect(policy.model, None if critic is None else critic.model, config)
    metrics = {
        "reward": batch.right.float().mean().item(),
        "solved": batch.right.all(dim=1).float().mean().item(),
    }
    for _ in range(config.trainer.update_epochs_per_batch):
        metrics |= update(policy, policy_loss(policy.model, batch, config.trainer.algorithm))
        if critic is not None:
            values = predict_values(critic.model, batch.tokens, batch.answers.shape[1])
            metrics |= update(critic, (values - batch.returns).square().mean())
    means = average(torch.tensor([*metrics.values()], dtype=torch.float64, device=config.trainer.device))
    return dict(zip(metrics, means.tolist(), strict=True))


@torch.no_grad()
def collect(policy: nn.Module, critic: nn.Module | None, config: Any) -> Batch:
    """Ask questions, sample the answers, reward each digit that is in its place; this rank's share."""
    environment, algorithm = config.environment, config.trainer.algorithm
    _, size = rank_and_size()
    shape = (config.trainer.train_batch_size // size, environment.length)
    questions = torch.randint(environment.digits, shape, device=config.trainer.device)
    tokens, log_probs = rollout(policy, questions, separator=environment.digits)
    answers = tokens[:, -environment.length :]
    right = answers == TASKS[environment.env_class](questions)
    rewards = right / environment.length
    if critic is None:
        returns = gae(rewards, torch.zeros_like(rewards), algorithm.gamma, 1.0)
        advantages = returns - average(returns.mean(dim=0))
    else:
        values = predict_values(critic, tokens, environment.length)
        advantages = gae(rewards, values, algorithm.gamma, algorithm.lambd)
        returns = advantages + values
    advantages = advantages - average(advantages.mean())
    advantages = advantages / (average(advantages.square().mean()).sqrt() + 1e-8)
    return Batch(tokens, answers, log_probs, right, advantages, returns)


def rollout(policy: nn.Module, questions: Tensor, separator: int) -> tuple[Tensor, Tensor]:
    """Sampled answers, behind their questions, and the log-probability of each of their tokens.

    Plain forward passes, since a model keeps those whatever wraps it, and generate() it may not.
    """
    tokens = torch.cat([questions, torch.full_like(questions[:, :1], separator)], dim=1)
    log_probs = []
    for _ in range(questions.shape[1]):
        following = next_token(policy(tokens).logits[:, -1])
        sampled = following.sample()
        log_probs.append(following.log_prob(sampled))
        tokens = torch.cat([tokens, sampled[:, None]], dim=1)
    return tokens, torch.stack(log_probs, dim=1)


def next_token(logits: Tensor) -> Any:
    """The distribution of the next token.

    Raises:
        FloatingPointError: There is none: the weights, or what they make of these tokens, are not finite.
    """
    if not logits.isfinite().all():
        raise FloatingPointError
    return Categorical(logits=logits)


def policy_loss(policy: nn.Module, batch: Batch, algorithm: Any) -> Tensor:
    """PPO's clipped objective (https://arxiv.org/abs/1707.06347), with a bonus on entropy."""
    following = next_token(policy(batch.tokens[:, :-1]).logits[:, -batch.answers.shape[1] :])
    ratio = (following.log_prob(batch.answers) - batch.log_probs).exp()
    clipped = ratio.clamp(1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    loss: Tensor = -(gain + algorithm.entropy_loss_coef * following.entropy()).mean()
    return loss


def predict_values(critic: nn.Module, tokens: Tensor, length: int) -> Tensor:
    """The critic's value before each token of the answers."""
    values: Tensor = critic(tokens[:, :-1])[:, -length:, 0]
    return values


def gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> Tensor:
    """Generalised advantage estimates (https://arxiv.org/abs/1506.02438)."""
    advantages = torch.zeros_like(rewards)
    following_value = following = torch.zeros_like(rewards[:, 0])
    for position in reversed(range(rewards.shape[1])):
        surprise = rewards[:, position] + gamma * following_value - values[:, position]
        following = surprise + gamma * lambd * following
        following_value = values[:, position]
        advantages[:, position] = following
    return advantages


def update(learner: Learner, loss: Tensor) -> dict[str, float]:
    """One optimizer step down the gradient of the loss; its metrics."""
    norm = learner.wrapped.descend(loss)
    return {f"{learner.role}/loss": loss.item(), f"{learner.role}/grad_norm": norm}


# What it shows


@contextmanager
def progress(steps: int, console: Console) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Shows a step's metrics: on a terminal below a bar, elsewhere as a line."""
    if not console.is_terminal:
        yield lambda metrics: console.print(
            *(f"{name}={_short(value)}" for name, value in metrics.items()), highlight=False, soft_wrap=True
        )
        return
    bar = Progress(*Progress.get_default_columns(), console=console)
    task = bar.add_task("training", total=steps)
    with Live(bar, console=console) as live:

        def show(metrics: Mapping[str, float]) -> None:
            bar.advance(task)
            table = Table.grid(padding=(0, 2))
            for name, value in metrics.items():
                table.add_row(name, _short(value))
            live.update(Group(bar, table))

        yield show


def summary(learner: Learner) -> Table:
    """The closing table of a role: what was frozen, whether it held, what it saved."""
    report = frozen_opt.report(learner.role)
    trainable = learner.start.keys() - set(report.names)
    astray = [*learner.astray, *moved(learner, frozen=True)]
    held = f"no: {', '.join(astray)}" if astray else "yes" if report.names else "none is frozen"
    total = sum(parameter.numel() for parameter in learner.model.parameters())
    _, size = rank_and_size()
    title = learner.role if size == 1 else f"{learner.role}, on {size} ranks together"
    table = Table(title=title, title_justify="left", show_header=False, min_width=72)
    table.add_row("parameters frozen", f"{report.parameter_count} of {len(learner.start)}")
    table.add_row("elements frozen", f"{report.element_count:,} of {total:,}")
    table.add_row("frozen ones bit-identical after training", held)
    table.add_row("trainable ones moved", f"{len(moved(learner, frozen=False))} of {len(trainable)}")
    table.add_row("optimizer state with the freeze", f"{state_bytes(learner.optimizer):,} bytes")
    table.add_row("optimizer state without it", f"{learner.state_bytes_unfrozen:,} bytes")
    return table


def moved(learner: Learner, *, frozen: bool) -> list[str]:
    """Which of the frozen parameters, or of the others, are not bit for bit what they were on some rank."""
    names = set(frozen_opt.report(learner.role).names)
    now = elements(learner.model)
    changed = [not torch.equal(bits(now[name]), bits(start)) for name, start in learner.start.items()]
    counts = ranks.add_up(torch.tensor(changed, dtype=torch.int64), None).tolist()
    return [name for name, count in zip(now, counts, strict=True) if count and (name in names) == frozen]


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
