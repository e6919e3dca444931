"""The guard: every way in which a freeze can be undone after it was proved is caught, with its cause."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import frozen_opt
from frozen_opt import FreezeReport
from frozen_opt.backends import bits as shards
from frozen_opt.guards import presence
from frozen_opt.matching.names import Walk, walk
from tests.models import Transformer, train, transformer

PATTERNS = ["*.mlp.gate.weight", "embedding.weight"]


def frozen(**options: bool) -> tuple[Transformer, torch.optim.Optimizer, FreezeReport]:
    model = transformer(**options)
    report = frozen_opt.freeze_parameters(model, PATTERNS, role="policy")
    optimizer = torch.optim.AdamW(frozen_opt.trainable_parameters(model), weight_decay=0.1)
    return model, optimizer, report


def flip_a_flag(model: Transformer) -> None:
    model.layers[1].mlp.gate.weight.requires_grad_(True)


def register_anew(model: Transformer) -> None:
    old = model.layers[1].mlp.gate.weight
    model.layers[1].mlp.gate.weight = nn.Parameter(old.detach().clone(), requires_grad=False)


def load_by_assignment(model: Transformer) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def wrap_in_an_adapter(model: Transformer) -> None:
    adapted = nn.Module()
    adapted.base_layer = model.layers[1].mlp.gate
    model.layers[1].mlp.gate = adapted


UNDOING: list[tuple[Callable[[Transformer], None], str]] = [
    (flip_a_flag, r"layers\.1\.mlp\.gate\.weight can be trained again: .*requires_grad_\(True\)"),
    (register_anew, r"layers\.1\.mlp\.gate\.weight is another tensor.* registered anew"),
    (load_by_assignment, r"embedding\.weight, .* is another tensor.*assign=True"),
    (wrap_in_an_adapter, r"layers\.1\.mlp\.gate\.weight is no longer in the model: .* adapter"),
]


@pytest.mark.parametrize(("undo", "text"), UNDOING, ids=lambda value: getattr(value, "__name__", ""))
def test_a_freeze_that_is_undone_is_caught(undo: Callable[[Transformer], None], text: str) -> None:
    model, optimizer, report = frozen()
    train(model, optimizer)
    report.verify(model, optimizer)
    undo(model)
    with pytest.raises(frozen_opt.FrozenParameterChangedError, match=text):
        report.verify(model, optimizer)


def test_the_first_call_takes_tensors_that_a_sharding_step_registered() -> None:
    model, optimizer, report = frozen()
    register_anew(model)
    report.verify(model, optimizer)
    register_anew(model)
    with pytest.raises(frozen_opt.FrozenParameterChangedError):
        report.verify(model, optimizer)


def test_what_is_missing_at_the_first_call_is_caught() -> None:
    model, _, report = frozen()
    wrap_in_an_adapter(model)
    with pytest.raises(frozen_opt.FrozenParameterChangedError, match="no longer in the model"):
        report.verify(model)


def test_untying_a_frozen_tensor_is_caught() -> None:
    model, optimizer, report = frozen(tied=True)
    report.verify(model, optimizer)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(frozen_opt.FrozenParameterChangedError, match=r"head\.weight can be trained again"):
        report.verify(model, optimizer)


def test_an_optimizer_that_got_a_frozen_parameter_later_is_caught() -> None:
    model, optimizer, report = frozen()
    report.verify(model, optimizer)
    optimizer.add_param_group({"params": [model.embedding.weight]})
    report.verify(model)
    with pytest.raises(
        frozen_opt.FrozenParameterInOptimizerError, match=r"embedding\.weight.*add_param_group"
    ):
        report.verify(model, optimizer)


def test_an_optimizer_of_another_model_proves_nothing() -> None:
    model, _, report = frozen()
    other = torch.optim.SGD(transformer().parameters())
    with pytest.raises(frozen_opt.UnsupportedBackendError, match="holds none of the model's parameters"):
        report.verify(model, other)


def test_wrapping_and_compiling_change_nothing() -> None:
    model, optimizer, report = frozen()
    report.verify(model, optimizer)
    report.verify(torch.compile(model), optimizer)  # type: ignore[arg-type]


def test_an_empty_list_has_nothing_to_verify() -> None:
    report = frozen_opt.freeze_parameters(transformer(), [], role="policy")
    report.verify(nn.Linear(1, 1), fingerprint=report.fingerprint(nn.Linear(1, 1)))


def test_training_keeps_the_fingerprint() -> None:
    model, optimizer, report = frozen()
    before = report.fingerprint(model)
    train(model, optimizer)
    report.verify(model, optimizer, fingerprint=before)
    assert report.fingerprint(model) == before
    assert list(before) == list(report.names)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.float8_e4m3fn]
)
def test_any_changed_bit_changes_the_fingerprint(dtype: torch.dtype) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.randn(5, 3).to(dtype), requires_grad=False)
            self.rest = nn.Parameter(torch.zeros(1))

    model = Holder()
    report = frozen_opt.freeze_parameters(model, ["frozen"], role="policy")
    before = report.fingerprint(model)
    raw = model.frozen.data.view(torch.uint8).flatten()
    for place in range(0, raw.numel(), 7):
        raw[place] ^= 1 << place % 8
        with pytest.raises(
            frozen_opt.FrozenParameterChangedError, match=r"values of frozen changed.*another checkpoint"
        ):
            report.verify(model, fingerprint=before)
        raw[place] ^= 1 << place % 8
    report.verify(model, fingerprint=before)


def test_values_that_change_places_change_the_fingerprint() -> None:
    model, _, report = frozen()
    before = report.fingerprint(model)
    model.embedding.weight.data = model.embedding.weight.data.flip(0).contiguous()
    with pytest.raises(frozen_opt.FrozenParameterChangedError, match=r"embedding\.weight changed"):
        report.verify(model, fingerprint=before)


def test_the_layout_in_memory_does_not_matter() -> None:
    model, _, report = frozen()
    before = report.fingerprint(model)
    model.embedding.weight.data = model.embedding.weight.data.t().contiguous().t()
    report.verify(model, fingerprint=before)


def test_hashes_of_large_tensors_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = torch.randn(1000)
    whole = list(shards.mixed_bits(elements, salt=3))
    split = torch.split
    monkeypatch.setattr(torch, "split", lambda tensor, _: split(tensor, 64))
    pieces = list(shards.mixed_bits(elements, salt=3))
    assert (len(whole), len(pieces)) == (1, 16)
    for part in (0, 1):
        assert torch.equal(whole[0][part], torch.cat([piece[part] for piece in pieces]))


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ({}, "taken of another freeze"),
        ({"embedding.weight": [1, 2, 3]}, "is no fingerprint"),
        ({"embedding.weight": [1, 2, 3, "4"]}, "is no fingerprint"),
        ({"embedding.weight": 4}, "is no fingerprint"),
    ],
)
def test_what_is_no_fingerprint_of_this_freeze_is_refused(saved: dict, text: str) -> None:
    model, _, report = frozen()
    with pytest.raises(frozen_opt.FreezeConfigError, match=text):
        report.verify(model, fingerprint=saved)


def test_a_report_travels_by_pickle_and_still_verifies() -> None:
    model, optimizer, report = frozen()
    report.verify(model, optimizer)
    copy = pickle.loads(pickle.dumps(report))
    assert copy == report
    copy.verify(model, optimizer, fingerprint=report.fingerprint(model))
    flip_a_flag(model)
    with pytest.raises(frozen_opt.FrozenParameterChangedError):
        copy.verify(model, optimizer)


# The next look


def replace_a_layer(model: Transformer) -> None:
    """By its equal, with everything frozen as before."""
    model.layers[1] = copy.deepcopy(model.layers[1])


def resize(model: Transformer) -> None:
    model.embedding.weight.data = torch.zeros(3, 8)


def take_away(model: Transformer) -> None:
    del model.layers[1].mlp.gate._parameters["weight"]


@pytest.mark.parametrize(
    "undo",
    [undo for undo, _ in UNDOING] + [replace_a_layer, resize, take_away],
    ids=lambda undo: undo.__name__,
)
def test_the_next_look_walks_only_if_something_has_changed(
    undo: Callable[[Transformer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, report = frozen()
    walks = 0

    def counted(*args: Any) -> Walk:
        nonlocal walks
        walks += 1
        return walk(*args)

    monkeypatch.setattr(presence, "walk", counted)
    for _ in range(3):
        report.verify(model)
    assert walks == 1
    undo(model)
    with pytest.raises(frozen_opt.FrozenParameterChangedError):
        report.verify(model)
    assert walks == 2


def test_another_root_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, report = frozen()
    report.verify(model)
    report.verify(torch.compile(model))
    other = copy.deepcopy(model)
    with pytest.raises(frozen_opt.FrozenParameterChangedError, match="another tensor"):
        report.verify(other)


def test_a_failed_look_keeps_no_model_alive() -> None:
    model, _, report = frozen()
    report.verify(model)
    flip_a_flag(model)
    gone = weakref.ref(model)
    gc.disable()
    try:
        with contextlib.suppress(frozen_opt.FrozenParameterChangedError):
            report.verify(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
