"""Globs: exactly fnmatch over whole names, the last match wins, a malformed list is an error."""

from collections import deque
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import frozen_opt
from frozen_opt.patterns import Matcher, check_patterns
from tests.models import transformer

# Few letters, so that random patterns often match; and every character that means something to a glob.
LETTERS = "ab0.]"
globs = st.text(alphabet=LETTERS + "*?[!-\\^\n", min_size=1, max_size=12).filter(lambda glob: glob[0] != "!")
names = st.text(alphabet=LETTERS + "[!*-\\^\n", min_size=1, max_size=12)


@settings(max_examples=1500, deadline=None)
@given(globs, names)
def test_one_pattern_is_fnmatchcase(glob: str, name: str) -> None:
    assert (Matcher([glob]).verdict_on(name) is not None) == fnmatchcase(name, glob)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.booleans(), globs), min_size=1, max_size=6), st.lists(names, max_size=10))
def test_a_list_is_fnmatchcase_and_the_last_match_wins(
    parts: list[tuple[bool, str]], some_names: list[str]
) -> None:
    patterns = ["!" * carve + glob for carve, glob in parts]
    matcher = Matcher(patterns)
    for name in some_names:
        selected, credited = False, []
        for index, (carve, glob) in enumerate(parts):
            if fnmatchcase(name, glob):
                credited += [index] if selected or not carve else []
                selected = not carve
        verdict = matcher.verdict_on(name)
        assert (verdict is not None and verdict.selected) == selected
        assert list(verdict.credited if verdict else ()) == credited


@settings(max_examples=300, deadline=None)
@given(st.lists(globs, min_size=1, max_size=4), st.lists(st.sampled_from("ab0[]*"), min_size=1, max_size=5))
def test_walking_component_by_component_says_the_same_as_the_whole_name(
    patterns: list[str], components: list[str]
) -> None:
    matcher = Matcher(patterns)
    path = deque(components)
    state = matcher.start
    while len(path) > 1:
        state = state[path.popleft()]
    assert state.verdicts[path[0]] == matcher.verdict_on(".".join(components))


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["*.mlp.gate.weight"], ["layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"]),
        (["layers.?.norm.*"], ["layers.0.norm.weight", "layers.1.norm.weight"]),
        (["layers.[!1].norm.weight"], ["layers.0.norm.weight"]),
        (["layers.[0-0].norm.weight", "head.weight"], ["layers.0.norm.weight", "head.weight"]),
        (["*.norm.*", "!layers.0.*"], ["layers.1.norm.weight"]),
        (["*.norm.*", "!layers.*", "layers.0.norm.weight"], ["layers.0.norm.weight"]),
    ],
)
def test_what_a_list_freezes(patterns: list[str], frozen: list[str]) -> None:
    report = frozen_opt.freeze_parameters(transformer(), patterns, role="policy")
    assert list(report.names) == frozen


def test_case_03_a_number_is_matched_whole() -> None:
    report = frozen_opt.freeze_parameters(transformer(layers=12), ["*.1.norm.*"], role="policy")
    assert report.names == ("layers.1.norm.weight",)


def test_matches_count_parameters_and_what_a_carve_out_takes_away() -> None:
    report = frozen_opt.freeze_parameters(
        transformer(), ["layers.*", "!*.norm.*", "*.0.norm.*"], role="policy"
    )
    assert report.matches == {"layers.*": 10, "!*.norm.*": 2, "*.0.norm.*": 1}
    assert report.parameter_count == 9


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ("*.gate.weight", r"write \['\*\.gate\.weight'\]"),
        (b"*.gate.weight", "must be a list"),
        (7, "is a int, and must be a list"),
        ({"*.gate.weight"}, "is a set, and must be a list"),
        ([""], "holds ''"),
        (["!"], "holds '!'"),
        (["head.*", 3], "holds 3"),
        (["head.*", None], "holds None"),
        (["!head.*"], r"starts with the carve-out '!head\.\*'"),
    ],
)
def test_case_17_malformed_lists_are_refused(patterns: object, says: str) -> None:
    with pytest.raises(frozen_opt.FreezeConfigError, match=says) as caught:
        check_patterns(patterns, "critic")
    assert "trainer.critic.freeze_parameters" in str(caught.value)


@pytest.mark.parametrize("empty", [None, [], ()])
def test_none_counts_as_empty(empty: object) -> None:
    assert check_patterns(empty, "policy") == []
