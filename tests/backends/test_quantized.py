"""Weights and optimizer state that are quantized: real tensors of torchao and bitsandbytes."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

pytest.importorskip(
    "torchao.quantization.quantize_.workflows.nf4",
    reason="these are the tensors of torchao 0.18",
    exc_type=ImportError,
)

import bitsandbytes
import torchao.optim
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import frozen_opt
from frozen_opt import (
    FrozenParameterChangedError,
    FrozenParameterInOptimizerError,
    UnsupportedBackendError,
    trainable_parameters,
    with_freezing,
)
from frozen_opt.testing import assert_excluded, assert_frozen, assert_no_state, unchanged

WIDTH = 64


def by_torchao(config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        quantize_(layer, config)
        return layer

    return build


def int4() -> nn.Module:
    """Two weights a byte, as torchao's kernels for int4 have them; those need a GPU, so they are not run."""
    layer = nn.Linear(WIDTH, WIDTH)
    packed = torch.randint(-128, 127, (WIDTH, WIDTH // 2), dtype=torch.int8)
    scale = torch.rand(2, WIDTH)
    weight = Int4Tensor(packed, scale, torch.zeros_like(scale), [1, WIDTH // 2], torch.Size([WIDTH, WIDTH]))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def nf4() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 8), requires_grad=False)
    return layer


def by_bitsandbytes(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(bitsandbytes.nn, kind)(WIDTH, WIDTH, **settings).to("cpu")


WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "torchao int8": by_torchao(Int8WeightOnlyConfig()),
    "torchao float8": by_torchao(Float8WeightOnlyConfig()),
    "torchao intx": by_torchao(IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "torchao int4": int4,
    "torchao nf4": nf4,
    "bitsandbytes nf4": by_bitsandbytes("Linear4bit", quant_type="nf4"),
    "bitsandbytes fp4, double": by_bitsandbytes("Linear4bit", quant_type="fp4", compress_statistics=True),
    "bitsandbytes nf4 in bf16": by_bitsandbytes("Linear4bit", quant_type="nf4", quant_storage=torch.bfloat16),
    "bitsandbytes int8": by_bitsandbytes("Linear8bitLt", has_fp16_weights=False),
}
RUNNING = [name for name in WEIGHTS if name not in ("torchao int4", "torchao nf4")]


def network(weights: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(WEIGHTS[weights](), nn.Linear(WIDTH, 8))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable_parameters(model), weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(3, WIDTH)).sum().backward()
        optimizer.step()


def a_plain_part(weight: Any) -> torch.Tensor:
    """The tensor with the weights themselves."""
    while is_traceable_wrapper_subclass(weight):
        names, _ = weight.__tensor_flatten__()
        weight = getattr(weight, "qdata", None) if "qdata" in names else getattr(weight, names[-1])
    return weight.data


@pytest.mark.parametrize("weights", WEIGHTS)
def test_case_37_quantized_weights_are_counted_in_full_and_proved(weights: str) -> None:
    model = network(weights)
    optimizer = with_freezing("policy", patterns=["0.*"])(adamw)(model)
    report = frozen_opt.report("policy")
    assert report.names == ("0.weight", "0.bias")
    assert report.element_count == WIDTH * WIDTH + WIDTH
    report.verify(model, optimizer)
    assert_frozen(model, ["0.*"])
    assert_excluded(optimizer, model, ["0.*"])
    assert_no_state(optimizer, model, ["0.*"])
    with pytest.raises(FrozenParameterInOptimizerError, match=r"0\.weight"):
        with_freezing("policy", patterns=["0.*"])(lambda model: torch.optim.SGD(model.parameters()))(
            network(weights)
        )


@pytest.mark.parametrize("weights", WEIGHTS)
def test_case_37_every_byte_of_quantized_weights_is_in_the_fingerprint(weights: str) -> None:
    model = network(weights)
    report = frozen_opt.freeze_parameters(model, ["0.*"], role="policy")
    checksums = report.fingerprint(model)
    report.verify(model, fingerprint=checksums)
    values = a_plain_part(model[0].weight).flatten().view(torch.uint8)
    values[7] ^= 1
    with pytest.raises(FrozenParameterChangedError, match=r"values of 0\.weight"):
        report.verify(model, fingerprint=checksums)
    values[7] ^= 1
    report.verify(model, fingerprint=checksums)


@pytest.mark.parametrize("weights", ["torchao int8", "torchao float8", "bitsandbytes nf4"])
def test_the_scales_of_quantized_weights_belong_to_them(weights: str) -> None:
    model = network(weights)
    report = frozen_opt.freeze_parameters(model, ["0.*"], role="policy")
    checksums = report.fingerprint(model)
    weight = model[0].weight
    scale = weight.quant_state.absmax if "bits" in weights else weight.scale
    scale.view(-1)[0] *= 2
    with pytest.raises(FrozenParameterChangedError, match=r"values of 0\.weight"):
        report.verify(model, fingerprint=checksums)


@pytest.mark.parametrize("weights", RUNNING)
def test_case_37_unchanged_and_fingerprint_through_training(weights: str) -> None:
    model = network(weights)
    optimizer = with_freezing("policy", patterns=["0.*"])(adamw)(model)
    report = frozen_opt.report("policy")
    checksums = report.fingerprint(model)
    with unchanged(model, ["0.*"]):
        train(model, optimizer)
    report.verify(model, optimizer, fingerprint=checksums)

    def spoil() -> None:
        a_plain_part(model[0].weight).flatten().view(torch.uint8)[3] ^= 1

    with pytest.raises(AssertionError, match=r"0\.weight moved"), unchanged(model, ["0.*"]):  # noqa: PT012
        train(model, optimizer)
        spoil()


@pytest.mark.parametrize("weights", RUNNING)
def test_case_37_weight_sync_sends_what_trains(weights: str) -> None:
    model = network(weights)
    engine = copy.deepcopy(model)
    optimizer = with_freezing("policy", patterns=["0.*"])(adamw)(model)
    train(model, optimizer)
    batch = torch.randn(3, WIDTH)
    assert not torch.equal(engine(batch), model(batch))
    engine.load_state_dict(dict(frozen_opt.trainable_named_parameters(model)), strict=False)
    assert torch.equal(engine(batch), model(batch))


class Opaque(torch.Tensor):
    """A tensor subclass that can't be taken apart."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> "Opaque":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, requires_grad=False)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"no {function}")


class OpaqueParameter(Opaque, nn.Parameter):
    pass


@pytest.mark.parametrize("weight", ["a subclass", "on meta", "sparse", "torch's own quantized"])
def test_case_37_what_cant_be_read_is_refused_by_name(weight: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values: dict[str, Callable[[], torch.Tensor]] = {
        "a subclass": lambda: OpaqueParameter((4, 4)),
        "on meta": lambda: torch.empty(4, 4, device="meta"),
        "sparse": lambda: torch.eye(4).to_sparse(),
        "torch's own quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
    }
    value = values[weight]()
    model[0].weight = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    optimizer = with_freezing("policy", patterns=["0.*"])(adamw)(model)
    report = frozen_opt.report("policy")
    assert report.element_count == 20
    report.verify(model, optimizer)
    name = "OpaqueParameter" if weight == "a subclass" else "torch.nn.parameter.Parameter"
    with pytest.raises(UnsupportedBackendError, match=f"{name} can't be read"):
        report.fingerprint(model)
    with pytest.raises(UnsupportedBackendError, match=f"{name} can't be read"), unchanged(model, ["0.*"]):
        pass


def test_an_optimizer_over_the_scales_of_frozen_weights_moves_them() -> None:
    model = network("torchao int8")
    scale = nn.Parameter(model[0].weight.scale)
    with pytest.raises(FrozenParameterInOptimizerError, match=r"in the memory of 0\.weight"):
        with_freezing("policy", patterns=["0.*"])(
            lambda model: torch.optim.SGD([scale, *trainable_parameters(model)])
        )(model)


OPTIMIZERS: list[type[torch.optim.Optimizer]] = [
    torchao.optim.AdamW8bit,
    torchao.optim.AdamW4bit,
    torchao.optim.AdamWFp8,
    bitsandbytes.optim.AdamW8bit,
    bitsandbytes.optim.Lion8bit,
    bitsandbytes.optim.AdamW,
]


def plain_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    return {
        key: value.dequantize()
        if is_traceable_wrapper_subclass(value)
        else torch.as_tensor(value).detach().clone()
        for key, value in optimizer.state[parameter].items()
    }


@pytest.mark.parametrize(
    "kind", OPTIMIZERS, ids=lambda kind: f"{kind.__module__.split('.')[0]} {kind.__name__}"
)
def test_optimizers_with_quantized_state_are_proved_and_migrated(kind: type[torch.optim.Optimizer]) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        return kind(trainable_parameters(model), lr=1e-3, weight_decay=0.1)

    model = plain_network()
    decorate = with_freezing("policy", patterns=["0.*"])
    with pytest.raises(FrozenParameterInOptimizerError, match=r"0\.weight"):
        decorate(lambda model: kind(model.parameters(), lr=1e-3))(model)
    optimizer = decorate(build)(model)
    report = frozen_opt.report("policy")
    with unchanged(model, ["0.*"]):
        train(model, optimizer)
    report.verify(model, optimizer)
    kept = state_of(optimizer, model[1].weight)
    saved, freeze = through_a_file(optimizer.state_dict()), report.state_dict(model, optimizer)

    model.requires_grad_(True)
    frozen_opt.reset()
    optimizer = with_freezing("policy", patterns=["2.*"])(build)(model)
    optimizer.load_state_dict(frozen_opt.migrate_optimizer_state(saved, optimizer, model, saved=freeze))
    moved = state_of(optimizer, model[1].weight)
    assert kept.keys() == moved.keys()
    assert all(torch.equal(kept[key], moved[key]) for key in kept)
    assert not optimizer.state.get(model[0].weight)
    with unchanged(model, ["2.*"]):
        train(model, optimizer)
