"""Small models that many tests share."""

import torch
import torch_optimizer
from torch import nn

from frozen_opt import named_parameters


class Mlp(nn.Module):
    """A router over two experts, named as in Qwen's MoE."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width, bias=False)
        self.mlp = Mlp(width)
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x + self.attention(x).tanh()))


class Transformer(nn.Module):
    """Tokens in, logits out; each layer has 5 parameters."""

    def __init__(self, layers: int, width: int, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer(layers: int = 2, width: int = 8, *, tied: bool = False, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(layers, width, tied=tied)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Real steps on random tokens, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 6), generator=generator)

        def closure(tokens: torch.Tensor = tokens) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            # the one that uses second derivatives asks for the graph
            loss.backward(create_graph=isinstance(optimizer, torch_optimizer.Adahessian))
            return loss.detach()

        closure()
        optimizer.step(*[closure] * isinstance(optimizer, torch.optim.LBFGS))  # Ranger ignores a closure


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter, by canonical name."""
    return {name: parameter.detach().clone() for name, parameter in named_parameters(model)}


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """The parameters that are no longer bit-identical to their copies."""
    return {name for name, parameter in named_parameters(model) if not torch.equal(parameter, before[name])}


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in named_parameters(model)}
