"""The assertions for trainers' tests: each one fails where it should, and says what differs."""

# ruff: noqa: PT012 - what raises is the end of the block

import re

import pytest
import torch
from torch import nn

import frozen_opt
from frozen_opt.optimizers_by_name import build_optimizer
from frozen_opt.testing import assert_excluded, assert_frozen, assert_no_state, unchanged
from tests.models import Transformer, train, transformer
from tests.versions import needs_muon

pytest_plugins = ["pytester"]

GATES = ["*.mlp.gate.weight"]


def frozen(patterns: list[str] = GATES) -> tuple[Transformer, torch.optim.Optimizer]:
    model = transformer()
    frozen_opt.freeze_parameters(model, patterns, role="policy")
    return model, torch.optim.AdamW(frozen_opt.trainable_parameters(model), lr=0.01, weight_decay=0.1)


def test_an_honoured_freeze_passes_everything() -> None:
    model, optimizer = frozen()
    with unchanged(model, GATES):
        train(model, optimizer)
    assert_frozen(model, GATES)
    assert_excluded(optimizer, model, GATES)
    assert_no_state(optimizer, model, GATES)
    assert_excluded({"schedulers": [], "optimizer": optimizer}, model, GATES)


def test_a_trainable_parameter_is_not_frozen() -> None:
    model, _ = frozen()
    model.layers[1].mlp.gate.weight.requires_grad_(True)
    with pytest.raises(AssertionError, match=r"^layers\.1\.mlp\.gate\.weight requires a gradient$"):
        assert_frozen(model, GATES)


def test_an_optimizer_built_before_the_freeze_is_caught() -> None:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    frozen_opt.freeze_parameters(model, GATES, role="policy")
    for check in (assert_excluded, assert_no_state):
        with pytest.raises(AssertionError, match=r"the optimizer holds layers\.0\.mlp\.gate\.weight"):
            check(optimizer, model, GATES)


def test_state_that_stayed_behind_is_caught() -> None:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    frozen_opt.freeze_parameters(model, GATES, role="policy")
    optimizer.param_groups[0]["params"] = frozen_opt.trainable_parameters(model)
    assert_excluded(optimizer, model, GATES)
    with pytest.raises(
        AssertionError, match=r"keeps step, exp_avg, exp_avg_sq for layers\.0\.mlp\.gate\.weight"
    ):
        assert_no_state(optimizer, model, GATES)


@needs_muon
def test_the_state_of_every_part_of_a_hybrid_is_seen() -> None:
    model = transformer()
    optimizer = build_optimizer(model, {"optimizer_config": {"optimizer": "Muon", "lr": 0.01}})
    train(model, optimizer, steps=1)
    for group in optimizer.param_groups:
        group["params"] = group["params"][:1]  # of the others, state alone is left
    for pattern, state in [
        ("layers.1.norm.weight", "step, exp_avg, exp_avg_sq"),
        (GATES[0], "momentum_buffer"),
    ]:
        with pytest.raises(AssertionError, match=f"keeps {state} for layers"):
            assert_no_state(optimizer, model, [pattern])


def test_the_optimizer_of_another_model_is_no_proof() -> None:
    model, _ = frozen()
    with pytest.raises(AssertionError, match="holds no parameter of the model"):
        assert_excluded(torch.optim.SGD(transformer().parameters()), model, GATES)


def test_a_moved_tensor_is_reported_with_its_difference_and_step() -> None:
    model, optimizer = frozen()
    weight = model.layers[1].mlp.gate.weight
    with pytest.raises(AssertionError) as caught, unchanged(model, GATES):
        train(model, optimizer, steps=2)
        weight.detach()[0, 3] += 0.5
        train(model, optimizer, steps=2)
    assert str(caught.value) == (
        "layers.1.mlp.gate.weight moved: largest difference 0.5 (seen after optimizer step 3)"
    )


def test_weight_decay_on_a_frozen_tensor_is_seen_at_the_first_step() -> None:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    with (
        pytest.raises(AssertionError, match=r"layers\.0.*after optimizer step 1\)\nlayers\.1.*step 1\)"),
        unchanged(model, GATES),
    ):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), -0.0])
def test_bits_are_compared_not_values(value: float) -> None:
    model, optimizer = frozen(["head.weight"])
    model.head.weight.detach().fill_(abs(value))
    with unchanged(model, ["head.weight"]):
        train(model, optimizer, steps=1)
        model.layers[0].norm.weight.detach().add_(1)
    with pytest.raises(AssertionError, match=r"head\.weight moved"), unchanged(model, ["head.weight"]):
        model.head.weight.detach().fill_(-0.0 if value == 0 else 1)
        model.layers[0].norm.weight.detach().add_(1)


def test_a_replaced_tensor_is_reported() -> None:
    model, optimizer = frozen()
    with (
        pytest.raises(AssertionError, match=r"became \(3, 8\) of torch.float32, from \(2, 8\)"),
        unchanged(model, GATES),
    ):
        model.layers[0].mlp.gate = nn.Linear(8, 3, bias=False)
        optimizer.step()
    with pytest.raises(AssertionError, match="is no longer in the model"), unchanged(model, GATES):
        del model.layers[0].mlp.gate


def test_a_block_in_which_nothing_moves_fails() -> None:
    model, optimizer = frozen()
    with pytest.raises(AssertionError, match="no other parameter moved either"), unchanged(model, GATES):
        optimizer.step()


def test_a_tied_tensor_is_not_something_else_that_moved() -> None:
    model = transformer(tied=True)
    with (
        pytest.raises(AssertionError, match=r"embedding\.weight moved") as caught,
        unchanged(model, ["head.weight"]),
    ):
        model.head.weight.detach().add_(1)
    assert "no other parameter moved either" in str(caught.value)


@needs_muon
def test_the_inner_steps_of_a_hybrid_count_as_one() -> None:
    model, _ = frozen()
    optimizer = build_optimizer(model, {"optimizer_config": {"optimizer": "Muon", "lr": 0.01}})
    with (
        pytest.raises(AssertionError, match=re.escape("(seen after optimizer step 2)")),
        unchanged(model, GATES),
    ):
        train(model, optimizer, steps=1)
        model.layers[0].mlp.gate.weight.detach().add_(1)
        train(model, optimizer, steps=1)


def test_a_body_that_raises_keeps_its_error() -> None:
    model, optimizer = frozen()
    with pytest.raises(ZeroDivisionError), unchanged(model, GATES):
        optimizer.step()
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["*.mlp.gates.weight"], r"matches no parameter; the closest names: layers\.0\.mlp\.gate\.weight"),
        (["*", "!*.gates"], r"'!\*\.gates' matches no parameter"),
        ([], "nothing would be checked"),
    ],
)
def test_patterns_that_check_nothing_fail(patterns: list[str], text: str) -> None:
    model, optimizer = frozen()
    for check in (
        lambda: assert_frozen(model, patterns),
        lambda: assert_excluded(optimizer, model, patterns),
        lambda: assert_no_state(optimizer, model, patterns),
        lambda: unchanged(model, patterns).__enter__(),
    ):
        with pytest.raises(AssertionError, match=text):
            check()


def test_the_plugin_offers_fixtures_and_forgets_between_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch, frozen_opt

        @pytest.fixture
        def model():
            return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

        def test_fixtures(model, assert_frozen, assert_excluded, assert_no_state, unchanged):
            frozen_opt.freeze_parameters(model, ["0.*"], role="policy")
            optimizer = torch.optim.SGD(frozen_opt.trainable_parameters(model), lr=0.1)
            assert_frozen(model, ["0.*"])
            assert_excluded(optimizer, model, ["0.*"])
            assert_no_state(optimizer, model, ["0.*"])
            with unchanged(model, ["0.*"]):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

        def test_forgets():
            assert frozen_opt.report("policy").parameter_count == 0

        def test_fails(model, assert_frozen):
            assert_frozen(model, ["1.*"])
        """
    )
    result = pytester.runpytest("-p", "no:xdist", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: 1.weight requires a gradient*"])
