"""Folded names are patterns that select exactly the names which were folded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frozen_opt.matching.braces import escape, fold
from frozen_opt.matching.patterns import Matcher, check_patterns

components = st.sampled_from(
    ["layers", "experts", "gate", "0", "1", "2", "3", "7", "12", "007", "w1", "a0b12"]
)
model_names = st.lists(components, min_size=1, max_size=5).map(".".join)
any_names = st.text(alphabet="ab019.*?[]{}!,\\ \n", min_size=1, max_size=6) | st.text(min_size=1, max_size=9)


@settings(max_examples=500, deadline=None)
@given(st.lists(model_names | any_names, max_size=40, unique=True), st.lists(model_names | any_names))
def test_folded_names_select_exactly_these(some: list[str], others: list[str]) -> None:
    patterns = fold(some)
    assert check_patterns(patterns, "policy") == patterns
    matcher = Matcher(patterns)
    for name in [*some, *others]:
        verdict = matcher.verdict_on(name)
        assert (verdict is not None and verdict.selected) == (name in some)
        assert verdict is None or len(verdict.credited) == 1


@given(any_names)
def test_an_escaped_text_selects_itself(text: str) -> None:
    matcher = Matcher(check_patterns([escape(text)], "policy"))
    assert matcher.verdict_on(text) is not None
    assert matcher.verdict_on(text + "a") is None


@pytest.mark.parametrize(
    ("some", "lines"),
    [
        ([f"model.layers.{i}.mlp.gate.weight" for i in range(48)], ["model.layers.{0..47}.mlp.gate.weight"]),
        ([f"layers.{i}.w" for i in (0, 1, 2, 5, 7, 8)], ["layers.{0..2,5,7..8}.w"]),
        (
            [f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)] + ["l.3.e.0.w"],
            ["l.{0..2}.e.{0..3}.w", "l.3.e.0.w"],
        ),
        (["head.weight", "head.bias"], ["head.weight", "head.bias"]),
        ([f"experts.weight{i}" for i in range(3)], ["experts.weight{0..2}"]),
    ],
)
def test_what_folds(some: list[str], lines: list[str]) -> None:
    assert fold(some) == lines
