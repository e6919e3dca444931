"""Patterns that mean something else elsewhere: a warning, or an error, that says what was meant."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import frozen_opt
from frozen_opt.matching.doubtful_patterns import idle_alternatives, look_alike
from frozen_opt.matching.patterns import Matcher
from tests.models import flags, transformer
from tests.ranks.launch import run_ranks


def twelve() -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(12))
    model.head = nn.Linear(1, 1)
    return model


def frozen_layers(model: nn.Module, patterns: list[str]) -> list[int]:
    names = frozen_opt.freeze_parameters(model, patterns, role="policy").names
    return [int(name.split(".")[1]) for name in names]


LOOK_ALIKES = [
    ("[^0]", "[!0]", [0], [*range(1, 10)]),
    ("[10-11]", "{10..11}", [0, 1], [10, 11]),
    ("[8-11]", "{8..11}", [1], [8, 9, 10, 11]),
    ("[0-11]", "{0..11}", [0, 1], [*range(12)]),
    ("[0:4]", "{0..3}", [0, 4], [0, 1, 2, 3]),
    ("[:4]", "{0..3}", [4], [0, 1, 2, 3]),
    ("[0:8:2]", "{0..7..2}", [0, 2, 8], [0, 2, 4, 6]),
    ("[0..3]", "{0..3}", [0, 3], [0, 1, 2, 3]),
    ("[0,5,11]", "{0,5,11}", [0, 1, 5], [0, 5, 11]),
    ("[0-3,7]", "{0..3,7}", [0, 1, 2, 3, 7], [0, 1, 2, 3, 7]),
    ("[0|11]", "{0,11}", [0, 1], [0, 11]),
    ("[11]", "11", [1], [11]),
]


@pytest.mark.parametrize(
    ("written", "meant", "frozen", "wanted"), LOOK_ALIKES, ids=[row[0] for row in LOOK_ALIKES]
)
def test_case_36_a_look_alike_is_warned_of_with_what_it_selected_and_what_was_meant(
    written: str, meant: str, frozen: list[int], wanted: list[int], logs: list[Any]
) -> None:
    assert frozen_layers(twelve(), [f"layers.{written}.*"]) == frozen
    (warning,) = [record["message"] for record in logs if record["level"].name == "WARNING"]
    assert f"'layers.{written}.*' selects layers." in warning
    assert warning.endswith(f": write 'layers.{meant}.*'")
    logs.clear()
    assert frozen_layers(twelve(), [f"layers.{meant}.*"]) == wanted
    assert [record["level"].name for record in logs] == ["INFO"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("layers.[!10-11].*", r"for all but \{10..11\}, select all and carve out a pattern with \{10..11\}"),
        ("layers.[-1].*", "no index from the end"),
        ("layers.[4:].*", "no index from the end"),
        ("layers.[\\d0].*", "no digit of a regex"),
        ("layers.[0-9]{0,1}.*", "braces hold alternatives, and don't count"),
    ],
)
def test_case_36_what_one_glob_can_not_say_is_warned_of(pattern: str, says: str, logs: list[Any]) -> None:
    frozen_opt.freeze_parameters(twelve(), [pattern], role="policy")
    assert re.search(says, logs[-1]["message"])


def test_a_carve_out_that_looks_like_a_range_is_warned_of(logs: list[Any]) -> None:
    frozen_opt.freeze_parameters(twelve(), ["layers.*", "!layers.[10-11].*"], role="policy")
    assert "'!layers.[10-11].*' takes away layers.{0..1}.weight: " in logs[-1]["message"]
    assert logs[-1]["message"].endswith("write '!layers.{10..11}.*'")


HONEST = [
    *("[0-3]", "[!a-z]", "weight[12]", "[qkv]_proj", "[a-zA-Z0-9_]", "[0-35-9]", "[_-]", "[a.-]", "[!0]"),
    *("[*]", "[?]", "[[]", "[]]", "[!]]", "[^]", "[\\]", "[,]", "{0..3,7}", "{q,k}_proj", "[", "[abc", "**"),
    *("*.[0-9]*.w", "[ab]{0..3}", "{!}x", "[{]0[}]"),
]


@pytest.mark.parametrize("pattern", HONEST)
def test_no_warning_on_an_honest_glob(pattern: str) -> None:
    assert look_alike(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        (r"layers\.\d+\.weight", "layers.*.weight"),
        (r"^layers\.(0|11)\.weight$", "layers.{0,11}.weight"),
        (r".*\.11\.weight", "*.11.weight"),
        (r"\.11\.", "*.11.*"),
        ("layers.(?:0|1).weight", "layers.{0,1}.weight"),
        ("layers.[0-9]+.weight", "layers.*.weight"),
        ("layers.0..3.weight", "layers.{0..3}.weight"),
        ("layers.0-3.weight", "layers.{0..3}.weight"),
        ("layers.3", "layers.3.*"),
        ("laye+rs.3.weight", None),
    ],
)
def test_case_36_what_matches_nothing_says_what_was_meant(pattern: str, meant: str | None) -> None:
    model = twelve()
    with pytest.raises(frozen_opt.UnmatchedPatternError) as caught:
        frozen_opt.plan_freezing(model, [pattern], role="policy")
    text = str(caught.value)
    assert text.startswith(f"role 'policy': {pattern!r} matches no parameter; the closest names: layers.")
    assert ("a glob is no regex" in text) == bool(set("\\^$()|+") & set(pattern))
    if meant is None:
        assert "was meant" not in text
    else:
        assert f"perhaps {meant!r} was meant" in text
        assert frozen_opt.plan_freezing(model, [meant], role="policy").names


@pytest.mark.parametrize(
    ("model", "patterns", "idle"),
    [
        (twelve, ["*", "!head"], "'!head' takes nothing away: .*perhaps '!head.\\*' was meant"),
        (twelve, ["*", "!hed.*"], "'!hed.*' takes nothing away: .*the closest names: head"),
        (twelve, ["*", "!{hed,haed}.*"], r"'!\{hed,haed\}\.\*' takes nothing away"),
        (twelve, ["layer.*", "!hed.*"], "'layer.*' matches no.*'!hed.*' takes nothing away"),
        (
            lambda: transformer(tied=True),
            ["*.weight", "!head.*", "!hed.*"],
            "'!hed.*' takes nothing away: it matches no parameter",
        ),
    ],
)
def test_case_36_a_carve_out_in_vain_is_named_whatever_else_is_wrong(
    model: Callable[[], nn.Module], patterns: list[str], idle: str
) -> None:
    built = model()
    with pytest.raises(frozen_opt.UnmatchedPatternError, match=idle):
        frozen_opt.plan_freezing(built, patterns, role="policy")
    assert all(flags(built).values())


def idle_carve_out_on_two_ranks() -> str:
    model = nn.ModuleDict({"ab"[torch.distributed.get_rank()]: nn.Linear(1, 1)})
    with pytest.raises(frozen_opt.FreezingError) as caught:
        frozen_opt.plan_freezing(model, ["*", "!c.*", "!a"], role="policy")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_case_36_a_carve_out_in_vain_is_named_on_every_rank() -> None:
    first, second = run_ranks(idle_carve_out_on_two_ranks, 2, timeout=60)
    assert first == second
    assert first.startswith("UnmatchedPatternError: role 'policy': '!c.*' takes nothing away: it matches no")
    assert "'!a' takes nothing away" in first
    assert "perhaps '!a.*' was meant" in first  # though rank 1 holds no `a`


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["bare", "wrapped"])
def test_case_39_a_pattern_for_a_buffer_says_that_it_is_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "head": nn.Linear(2, 2)})
    with pytest.raises(
        frozen_opt.UnmatchedPatternError, match=r"it matches norm\.running_mean, a buffer, and buffers are"
    ):
        frozen_opt.plan_freezing(wrap(model), ["norm.running_m*"], role="policy")


# Alternatives in vain


def test_alternatives_that_match_nothing_are_warned_of(logs: list[Any]) -> None:
    patterns = ["layers.{8..15}.*", "{head,value_head}.{weight,bias}"]
    frozen_opt.freeze_parameters(twelve(), ["layers.0.*", *patterns[1:]], role="policy")
    assert logs[-1]["message"] == (
        "policy: of '{head,value_head}.{weight,bias}' these alternatives match no parameter: value_head"
    )
    frozen_opt.freeze_parameters(twelve(), patterns[:1], role="policy")
    assert logs[-1]["message"].endswith(
        "of 'layers.{8..15}.*' these alternatives match no parameter: {12..15}"
    )


parts = st.sampled_from(["a", "b", "c", "ab", "?", "a*", "[ab]", "0..2"])
groups = st.lists(parts, min_size=2, max_size=3, unique=True).map(lambda some: "{" + ",".join(some) + "}")
ends = st.sampled_from(["", "a", "*", "?", "*b"])


@settings(max_examples=300, deadline=None)
@given(st.lists(ends | groups, min_size=1, max_size=4).map("".join), st.lists(st.text("abc012", max_size=6)))
def test_only_alternatives_in_vain_are_named(glob: str, some: list[str]) -> None:
    names = [name for name in some if Matcher([glob]).verdict_on(name)]
    found = list(idle_alternatives(glob, names))
    for idle in found:
        # The glob with this alternative alone, in whichever braces, matches none of the names.
        ways = [
            glob[: group.start()] + "{" + idle.strip("{}'") + "}" + glob[group.end() :]
            for group in re.finditer(r"\{[^}]*\}", glob)
        ]
        assert any(not any(Matcher([way]).verdict_on(name) for name in names) for way in ways)


@pytest.mark.parametrize(
    ("glob", "names", "idle"),
    [
        ("*.{q,k,w}_proj.weight", ["a.q_proj.weight", "a.k_proj.weight"], ["w"]),
        ("*.{q,k,w}_proj.{weight,bias*}", ["a.q_proj.weight", "a.k_proj.bias"], ["w"]),
        ("*{a,b}*{b,a}*", ["xaby"], ["b", "a"]),
        ("{a.b,c.d,a.d}", ["a.b", "c.d", "a.d"], []),
        ("{a,ab}{bc,c}", ["abc"], []),  # in either of two ways
        ("x{,y}", ["xy"], ["''"]),
        ("l.{0..9}.w", [f"l.{i}.w" for i in (0, 1, 2, 5)], ["{3..4,6..9}"]),
    ],
)
def test_which_alternatives_are_in_vain(glob: str, names: list[str], idle: list[str]) -> None:
    assert list(idle_alternatives(glob, names)) == idle


def test_the_patterns_that_the_log_prints_select_what_was_frozen(logs: list[Any]) -> None:
    config = Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=12, vocab_size=16, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    first = frozen_opt.freeze_parameters(Qwen3ForCausalLM(config), ["*.layers.*", "!*.7.*"], role="policy")
    assert first.parameter_count == 11 * 11
    folded = logs[-1]["message"].partition("): ")[2]
    patterns = re.split(r", (?![^{]*\})", folded)
    again = frozen_opt.plan_freezing(Qwen3ForCausalLM(config), patterns, role="policy")
    assert again.names == first.names
