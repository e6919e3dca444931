"""Buffers that move under a frozen part are warned of, whatever the class, and those that don't are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import spectral_norm
from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d

import frozen_opt

WIDTH = 8


class Part(nn.Module):
    """A layer with a buffer; what forward does to it is said by subclasses."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH), persistent=persistent)
        self.register_buffer("nothing", None)

    def look(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.look(self.linear(x))


class Assigns(Part):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x


class AssignsInATuple(Part):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        x, self.average = x, x.detach().mean(0)
        return x


class AddsTo(Part):
    def forward(this, x: torch.Tensor) -> torch.Tensor:
        this.average += x.detach().mean(0)
        return this.linear(x)


class InPlace(Part):
    @torch.no_grad()
    def look(self, x: torch.Tensor) -> torch.Tensor:
        self.average.data.lerp_(x.mean(0), 0.1)
        return x


class BySlice(Part):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        self.average[2:4] = x.detach()[0, 2:4]
        return x


class Out(Part):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        torch.mean(x.detach(), 0, out=self.average)
        return x


class ByAFunction(Part):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        move_inplace(self.average, x.detach().mean(0))
        return x


def move_inplace(average: torch.Tensor, new: torch.Tensor) -> None:
    average.mul_(0.9).add_(new, alpha=0.1)


class OwnBatchNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(WIDTH))

    def look(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.average, self.spread, training=self.training)


class ByTheBaseClass(InPlace):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        return super().look(2 * x)


class NotByTheBaseClass(InPlace):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Reads(Part):
    def look(self, x: torch.Tensor) -> torch.Tensor:
        self.average = self.average.to(x.device)
        return x + self.average

    def reset(self) -> None:
        self.average.zero_()


class Router(nn.Module):
    """As torchtitan has it: forward counts, and an optimizer hook moves the bias."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("tokens_per_expert", torch.zeros(4), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        self.tokens_per_expert += torch.bincount((scores + self.expert_bias).argmax(-1), minlength=4)
        return scores.mean() * x


def fake_quantized() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), FakeQuantize())


def block(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)


class Images(nn.Module):
    """For norms of images."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).view(-1, WIDTH, 1, 1).expand(-1, -1, 2, 3)).mean((2, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "batch norm": (lambda: block(nn.BatchNorm1d(WIDTH)), "running statistics of 0.1"),
    "batch norm without affine": (
        lambda: block(nn.BatchNorm1d(WIDTH, affine=False)),
        "running statistics of 0.1",
    ),
    "instance norm": (
        lambda: Images(nn.InstanceNorm2d(WIDTH, track_running_stats=True)),
        "running statistics of 0.norm",
    ),
    "batch norm without statistics": (
        lambda: block(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
        None,
    ),
    "batch norm that is constant": (lambda: Images(DetrFrozenBatchNorm2d(WIDTH)), None),
    "spectral norm": (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), "spectral norm of 0"),
    "spectral norm as a parametrization": (
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        "spectral norm of 0.parametrizations.weight.0",
    ),
    "observers of quantization": (fake_quantized, "buffers 0.1."),
    "a router": (Router, "buffers expert_bias, tokens_per_expert"),
    "assigned": (Assigns, "0.average"),
    "assigned in a tuple": (AssignsInATuple, "0.average"),
    "added to": (AddsTo, "0.average"),
    "in place": (InPlace, "0.average"),
    "a slice": (BySlice, "0.average"),
    "out=": (Out, "0.average"),
    "by a function": (ByAFunction, "0.average"),
    "by torch's batch_norm": (OwnBatchNorm, "0.average, 0.spread"),
    "by a base class": (ByTheBaseClass, "0.average"),
    "not by a base class": (NotByTheBaseClass, None),
    "read": (Reads, None),
    "dropout": (lambda: block(nn.Dropout()), None),
}


def freeze(model: nn.Module, patterns: list[str], logs: list[Any]) -> list[str]:
    frozen_opt.reset()
    logs.clear()
    frozen_opt.freeze_parameters(model, patterns, role="policy")
    return [record["message"] for record in logs if record["level"].name == "WARNING"]


@pytest.mark.parametrize("case", CASES)
def test_case_38_what_moves_is_warned_of_and_nothing_else(case: str, logs: list[Any]) -> None:
    torch.manual_seed(0)
    build, expected = CASES[case]
    model = nn.Sequential(build(), nn.Linear(WIDTH, 2))
    warnings = freeze(model, ["0.*"], logs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = torch.optim.SGD(frozen_opt.trainable_parameters(model), lr=0.1)
    for _ in range(3):
        model(torch.randn(6, WIDTH)).sum().backward()
        optimizer.step()
    moved = any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert moved == (expected is not None), "the case is what it says"
    if expected is None:
        assert not warnings
    else:
        (warning,) = warnings
        assert expected in warning
        assert "must stay as well" in warning


def test_the_remedy_stops_statistics_and_spectral_norm() -> None:
    for case in ("batch norm without affine", "spectral norm", "spectral norm as a parametrization"):
        part = CASES[case][0]()
        part.eval()
        before = {name: buffer.clone() for name, buffer in part.named_buffers()}
        part(torch.randn(6, WIDTH))
        assert all(torch.equal(buffer, before[name]) for name, buffer in part.named_buffers())


def test_one_line_a_kind(logs: list[Any]) -> None:
    model = nn.ModuleList([build() for build, _ in CASES.values()])
    warnings = freeze(nn.ModuleList([model, nn.Linear(2, 2)]), ["0.*"], logs)
    assert len(warnings) == 4
    (statistics,) = [text for text in warnings if "statistics" in text]
    assert "0.0.1, 0.1.1, 0.2.norm" in statistics


def test_buffers_of_what_trains_are_nobodys_surprise(logs: list[Any]) -> None:
    model = nn.Sequential(block(nn.BatchNorm1d(WIDTH)), Router(), InPlace(), nn.Linear(WIDTH, WIDTH))
    assert not freeze(model, ["3.*"], logs)
    assert not freeze(model, ["0.1.bias", "2.linear.bias"], logs)  # a part of a module still trains


def test_buffers_that_are_not_saved_hold_no_state(logs: list[Any]) -> None:
    model = nn.Sequential(InPlace(persistent=False), nn.Linear(WIDTH, WIDTH))
    assert not freeze(model, ["0.*"], logs)


class MoE(nn.Module):
    """The bias is the layer's, as on torchtitan, and experts may train under a frozen router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Sequential(nn.Linear(WIDTH, 4))
        self.experts = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("expert_bias", torch.zeros(4))


def test_case_38_the_bias_of_a_frozen_router_beside_experts_that_train(logs: list[Any]) -> None:
    model = nn.Sequential(MoE(), nn.Linear(WIDTH, WIDTH))
    (warning,) = freeze(model, ["0.router.*"], logs)
    assert "buffers expert_bias of the frozen routers" in warning
    model.requires_grad_(True)
    assert not freeze(model, ["0.experts.*"], logs)


def test_names_are_those_of_the_bare_model(logs: list[Any]) -> None:
    model = torch.compile(nn.Sequential(block(nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, 2)))
    (warning,) = freeze(model, ["0.*"], logs)
    assert "statistics of 0.1 are" in warning
