"""The RL: PPO on answers to small puzzles of digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from frozen_opt.demo.backends import average, rank_and_size
from frozen_opt.demo.learners import Learner

TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda questions: questions,
    "reverse": lambda questions: questions.flip(1),
    "sort": lambda questions: questions.sort(dim=1).values,
}


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
