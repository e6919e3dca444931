"""`frozen-opt demo`: a small, real RL run, with a freeze that is checked when it ends.

A Qwen3-MoE policy learns by PPO to sort (copy, reverse) a few digits; a critic, the same body with a value
head, estimates the reward for GAE. demo.yaml says what is frozen, and everything else.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from frozen_opt.backends import plain
from frozen_opt.headers import BadInput

TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda questions: questions,
    "reverse": lambda questions: questions.flip(1),
    "sort": lambda questions: questions.sort(dim=1).values,
}

OptimizerFactory = Callable[[nn.Module, Any], torch.optim.Optimizer]


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
        return train(config, out)
    finally:
        torch.set_num_threads(threads)


def train(config: Any, out: Path) -> bool:
    """Build both roles, train them, and compare their weights with what they were."""
    learners = make_learners(config)
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    with (
        (out / "metrics.jsonl").open("w", encoding="utf-8") as file,
        progress(config.trainer.steps, console) as show,
    ):
        for step in range(1, config.trainer.steps + 1):
            try:
                metrics = {"step": step, **ppo_step(**learners, config=config), **frozen_opt.metrics()}
            except ValueError as error:  # Categorical takes no NaN
                raise BadInput(f"training diverged in step {step}: lower the learning rates") from error
            print(json.dumps(metrics), file=file, flush=True)
            show(metrics)
    for learner in learners.values():
        console.print(summary(learner))
    console.print(f"metrics of each step: {file.name}", markup=False, highlight=False, soft_wrap=True)
    return not any(moved(learner, frozen=True) for learner in learners.values())


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
    for override in overrides:
        _merge(default, [override])  # each alone first, for a message that names it
    config = _merge(default, overrides)
    _check(OmegaConf.to_container(config, resolve=True), OmegaConf.to_container(default))
    if config.environment.env_class not in TASKS:
        raise BadInput(f"environment.env_class is {config.environment.env_class!r}, not one of {[*TASKS]}")
    return config


def _merge(default: Any, overrides: Sequence[str]) -> Any:
    text = " ".join(overrides)[:200]
    if not all("=" in override for override in overrides):
        raise BadInput(f"malformed override {text!r}: write key=value, as in trainer.steps=30")
    try:
        config = OmegaConf.merge(default, OmegaConf.from_dotlist(list(overrides)))
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except ConfigKeyError as error:
        raise BadInput(f"unknown key in {text!r}: {_first_line(error)}") from error
    except Exception as error:  # OmegaConf's, YAML's, ANTLR's
        raise BadInput(
            f"malformed override {text!r}: {_first_line(error)}\n"
            """Values are YAML, so quote patterns: 'trainer.policy.freeze_parameters=["*.mlp.gate.weight"]'"""
        ) from error
    return config


def _check(value: Any, default: Any, key: str = "") -> None:
    """That a value is of its default's type, and a number no less than it may be."""
    name = key.rpartition(".")[2]
    if name == "freeze_parameters" or (name == "critic" and value is None):
        return  # frozen_opt checks patterns
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


def _first_line(error: Exception) -> str:
    # What YAML's errors found, and not the text around it
    return str(getattr(error, "problem", None) or error).partition("\n")[0]


# The models and their optimizers


@dataclass
class Learner:
    """One role: its model, its optimizer, and what the closing table compares them with."""

    role: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    max_grad_norm: float
    start: dict[str, Tensor]
    state_bytes_unfrozen: int


class Critic(nn.Module):
    """The policy's body with a value head, as SkyRL builds it: a value for each token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = Qwen3MoeModel(config)
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        values: Tensor = self.value_head(self.model(tokens).last_hidden_state)
        return values.squeeze(-1)


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
        return {role: make_learner(role, model, config) for role, model in models.items()}
    except (BadInput, frozen_opt.FreezingError):
        raise
    except Exception as error:  # whatever torch and transformers have against a setting
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise BadInput(f"no model and optimizer can be made of these settings: {reason}") from error


def make_learner(role: str, model: nn.Module, config: Any) -> Learner:
    """Wrap the model, and build its optimizer with the role's parameters frozen."""
    model, build_optimizer = place(model, config)
    node = config.trainer[role]
    state_bytes_unfrozen = measure_unfrozen(model, build_optimizer, node)
    return Learner(
        role,
        model,
        frozen_opt.with_freezing(role)(build_optimizer)(model, node),
        node.optimizer_config.max_grad_norm,
        {name: parameter.detach().clone() for name, parameter in frozen_opt.named_parameters(model)},
        state_bytes_unfrozen,
    )


def place(model: nn.Module, config: Any) -> tuple[nn.Module, OptimizerFactory]:
    """The model on its device, wrapped for `trainer.strategy`, and that backend's optimizer factory."""
    if config.trainer.strategy == "torch":
        return model.to(config.trainer.device), plain.build_optimizer
    raise BadInput(f"trainer.strategy is {config.trainer.strategy!r}, not one of ['torch']")


def measure_unfrozen(model: nn.Module, build_optimizer: OptimizerFactory, node: Any) -> int:
    """Bytes of optimizer state had nothing been frozen, by a step with a copy of the model.

    Running the copy first finds sizes that don't fit each other before training starts.
    """
    twin = copy.deepcopy(model).requires_grad_(True)
    optimizer = build_optimizer(twin, node)
    twin(torch.zeros(1, 2, dtype=torch.long, device=next(twin.parameters()).device))
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return state_bytes(optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


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
    return metrics


@torch.no_grad()
def collect(policy: nn.Module, critic: nn.Module | None, config: Any) -> Batch:
    """Ask questions, sample the answers, reward each digit that is in its place."""
    environment, algorithm = config.environment, config.trainer.algorithm
    shape = (config.trainer.train_batch_size, environment.length)
    questions = torch.randint(environment.digits, shape, device=config.trainer.device)
    tokens, log_probs = rollout(policy, questions, separator=environment.digits)
    answers = tokens[:, -environment.length :]
    right = answers == TASKS[environment.env_class](questions)
    rewards = right / environment.length
    if critic is None:
        returns = gae(rewards, torch.zeros_like(rewards), algorithm.gamma, 1.0)
        advantages = returns - returns.mean(dim=0)
    else:
        values = predict_values(critic, tokens, environment.length)
        advantages = gae(rewards, values, algorithm.gamma, algorithm.lambd)
        returns = advantages + values
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    return Batch(tokens, answers, log_probs, right, advantages, returns)


def rollout(policy: nn.Module, questions: Tensor, separator: int) -> tuple[Tensor, Tensor]:
    """Sampled answers, behind their questions, and the log-probability of each of their tokens.

    Plain forward passes, since a model keeps those whatever wraps it, and generate() it may not.
    """
    tokens = torch.cat([questions, torch.full_like(questions[:, :1], separator)], dim=1)
    log_probs = []
    for _ in range(questions.shape[1]):
        following: Any = Categorical(logits=policy(tokens).logits[:, -1])
        sampled = following.sample()
        log_probs.append(following.log_prob(sampled))
        tokens = torch.cat([tokens, sampled[:, None]], dim=1)
    return tokens, torch.stack(log_probs, dim=1)


def policy_loss(policy: nn.Module, batch: Batch, algorithm: Any) -> Tensor:
    """PPO's clipped objective (https://arxiv.org/abs/1707.06347), with a bonus on entropy."""
    following: Any = Categorical(logits=policy(batch.tokens[:, :-1]).logits[:, -batch.answers.shape[1] :])
    ratio = (following.log_prob(batch.answers) - batch.log_probs).exp()
    clipped = ratio.clamp(1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    loss: Tensor = -(gain + algorithm.entropy_loss_coef * following.entropy()).mean()
    return loss


def predict_values(critic: nn.Module, tokens: Tensor, length: int) -> Tensor:
    """The critic's value before each token of the answers."""
    values: Tensor = critic(tokens[:, :-1])[:, -length:]
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
    learner.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(learner.model.parameters(), learner.max_grad_norm or math.inf)
    learner.optimizer.step()
    return {f"{learner.role}/loss": loss.item(), f"{learner.role}/grad_norm": norm.item()}


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
    astray = moved(learner, frozen=True)
    held = f"no: {', '.join(astray)}" if astray else "yes" if report.names else "none is frozen"
    elements = sum(parameter.numel() for parameter in learner.model.parameters())
    table = Table(title=learner.role, title_justify="left", show_header=False, min_width=72)
    table.add_row("parameters frozen", f"{report.parameter_count} of {len(learner.start)}")
    table.add_row("elements frozen", f"{report.element_count:,} of {elements:,}")
    table.add_row("frozen ones bit-identical after training", held)
    table.add_row("trainable ones moved", f"{len(moved(learner, frozen=False))} of {len(trainable)}")
    table.add_row("optimizer state with the freeze", f"{state_bytes(learner.optimizer):,} bytes")
    table.add_row("optimizer state without it", f"{learner.state_bytes_unfrozen:,} bytes")
    return table


def moved(learner: Learner, *, frozen: bool) -> list[str]:
    """Which of the frozen parameters, or of the others, are not bit for bit what they were."""
    names = set(frozen_opt.report(learner.role).names)
    return [
        name
        for name, parameter in frozen_opt.named_parameters(learner.model)
        if (name in names) == frozen and not torch.equal(_bits(parameter), _bits(learner.start[name]))
    ]


def _bits(tensor: Tensor) -> Tensor:
    """As bytes: torch.equal takes -0.0 for 0.0, and NaN for different from itself."""
    return tensor.detach().flatten().view(torch.uint8)


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
