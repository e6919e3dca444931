"""Globs: exactly fnmatch over whole names, the last match wins, a malformed list is an error."""

import re
from collections import deque
from fnmatch import fnmatchcase

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import frozen_opt
from frozen_opt.matching.patterns import Matcher, check_patterns
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
        state = state.after[path.popleft()]
    assert state.verdicts[path[0]] == matcher.verdict_on(".".join(components))
    assert state.may_end or state.verdicts[path[0]] is None


@pytest.mark.parametrize(
    ("pattern", "ending"),
    [
        ("*.gate.weight", ["gate"]),
        ("*.weight", ["gate", "up", "down"]),
        ("*.ga*", ["gate", "up", "down"]),
        ("mlp.gate*", ["gate"]),
        ("mlp.*.[!w]*", ["gate", "up", "down"]),
        ("mlp.{gate,up.proj}.weight", ["gate"]),
        ("mlp.up.{weight,proj.weight}", ["up"]),
        ("mlp.up[.]weight", ["up"]),
    ],
)
def test_only_modules_where_a_pattern_may_end_are_asked_for_their_parameters(
    pattern: str, ending: list[str]
) -> None:
    inside = Matcher([pattern]).start.after["mlp"]
    assert [name for name in ("gate", "up", "down") if inside.after[name].may_end] == ending


# Braces


def written_out(pattern: str) -> list[str]:
    """The globs that a pattern stands for, by rewriting its innermost braces until none are left."""
    globs, done = [pattern], []
    while globs and len(done) < 3000:
        glob = globs.pop()
        inner = re.search(r"\{([^{}]*)\}", glob)
        if inner is None:
            done.append(glob)
            continue
        for part in inner[1].split(","):
            ends = part.split("..")
            numbers = range(int(ends[0]), int(ends[1]) + 1) if len(ends) == 2 else [part]
            globs += [f"{glob[: inner.start()]}{number}{glob[inner.end() :]}" for number in numbers]
    return done


ranges = st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda pair: f"{pair[0]}..{sum(pair)}")
pieces = st.text(alphabet="ab01*?", max_size=3) | st.sampled_from(["[!a]", "[a0]", "[!-b]", "[0-1]"])
braces = st.recursive(
    st.lists(ranges | pieces, min_size=2, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}"),
    lambda inner: st.lists(st.tuples(pieces, inner | st.just("")).map("".join), min_size=2, max_size=3).map(
        lambda parts: "{" + ",".join(parts) + "}"
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(pieces, braces, pieces | st.just("."), braces | st.just("")).map("".join),
    st.lists(st.text(alphabet="ab012.", max_size=8), max_size=8),
    st.data(),
)
def test_braces_are_the_union_of_the_globs_that_they_stand_for(
    pattern: str, some_names: list[str], data: st.DataObject
) -> None:
    globs = written_out(pattern)
    assume(len(globs) < 3000)
    fitting = data.draw(st.sampled_from(globs))  # names that match are rare otherwise
    some_names.append(re.sub(r"\[.*?\]|[*?]", lambda _: data.draw(st.sampled_from("ab01")), fitting))
    matcher = Matcher([pattern])
    for name in some_names:
        assert (matcher.verdict_on(name) is not None) == any(fnmatchcase(name, glob) for glob in globs)


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("layers.{8..11}.w", [8, 9, 10, 11]),
        ("layers.{11..8}.w", [8, 9, 10, 11]),
        ("layers.{0..3,7}.w", [0, 1, 2, 3, 7]),
        ("layers.{0..10..5}.w", [0, 5, 10]),
        ("layers.{7}.w", [7]),
        ("layers.{1,1{0,1}}.w", [1, 10, 11]),
        ("layers.1{,0..1}.w", [1, 10, 11]),
        ("layers.{?,[1]1}.w", [*range(10), 11]),
    ],
)
def test_what_braces_select(pattern: str, numbers: list[int]) -> None:
    matcher = Matcher([pattern])
    assert [n for n in range(13) if matcher.verdict_on(f"layers.{n}.w")] == numbers


def test_padded_numbers_keep_their_width() -> None:
    matcher = Matcher(["h{08..11}"])
    assert [name for name in ("h8", "h08", "h09", "h11", "h011") if matcher.verdict_on(name)] == [
        *("h08", "h09", "h11")
    ]


def test_braces_count_as_one_pattern() -> None:
    patterns = ["layers.{0..1}.norm.*", "!layers.{1,0}.{norm,attention}.*", "head.*"]
    with pytest.raises(frozen_opt.UnmatchedPatternError) as caught:
        frozen_opt.plan_freezing(transformer(), [*patterns[:1], "layers.{4..7}.*"], role="policy")
    assert "'layers.{4..7}.*' matches no parameter; the closest names: layers." in str(caught.value)
    plan = frozen_opt.plan_freezing(transformer(), patterns, role="policy")
    assert plan.matches == dict(zip(patterns, (2, 2, 1), strict=True))
    assert plan.patterns == tuple(patterns)


def test_a_pattern_of_many_alternatives_needs_no_product_of_them() -> None:
    matcher = Matcher(["{0..93}.{0..383}.{0..383}.{q,k,v}"])
    assert matcher.verdict_on("93.383.0.v") is not None
    assert matcher.verdict_on("93.384.0.v") is None


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
        (["*", "!layers.{0,1.*"], r"holds '!layers\.\{0,1\.\*': its braces \{ \} are unbalanced"),
        (["layers.0}.*"], "unbalanced"),
        (["{a,{b}"], "unbalanced"),
        (["layers.{}.*"], "hold nothing"),
        (["{a..c}.*"], r"'a\.\.c' in braces is no range"),
        (["{0..}.*"], r"'0\.\.' in braces is no range"),
        (["{0..-1}.*"], r"'0\.\.-1' in braces is no range"),
        (["{1,0-3}.*"], r"'0-3' in braces is no range: write \{0\.\.3\}"),
        (["{0:4}.*"], r"'0:4' in braces is no range: write \{0\.\.3\}"),
        (["{q, k}_proj"], r"' k' in braces has a space"),
        (["{0..99999999999999999999}"], "more than 10,000 numbers"),
        (["{" * 1000 + "}" * 1000], "more than 20 deep"),
        (["{0..9999}" * 9], "and 100,000 at most are taken"),
    ],
)
def test_case_17_malformed_lists_are_refused(patterns: object, says: str) -> None:
    with pytest.raises(frozen_opt.FreezeConfigError, match=says) as caught:
        check_patterns(patterns, "critic")
    assert "trainer.critic.freeze_parameters" in str(caught.value)


@pytest.mark.parametrize("empty", [None, [], ()])
def test_none_counts_as_empty(empty: object) -> None:
    assert check_patterns(empty, "policy") == []
