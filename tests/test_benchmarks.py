"""The benchmarks run, in sizes below even their small form; their claims hold, but for those on time."""

import json
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import frozen_opt
from benchmarks import common, copies, matching, optimizer_state, picture, ranks, training_step
from tests.versions import MUON, needs_fsdp2_on_cpu


@pytest.fixture(autouse=True)
def _results_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)


def exact(result: common.Result) -> dict[str, bool]:
    """The claims that a busy machine can't break."""
    timed = ("cost:", "time grows", "faster", "verify takes")
    return {
        claim: holds for claim, holds in result.claims.items() if not any(word in claim for word in timed)
    }


def test_the_reference_trees_are_as_large_as_they_say() -> None:
    sizes = [
        sum(1 for _ in matching.tree(layers, experts).parameters())
        for layers, experts in matching.TREES.values()
    ]
    assert sizes == [36_661, 70_639]
    assert [len(set(matching.patterns(count))) for count in (1, 10, 50)] == [1, 10, 50]


def test_all_ways_of_matching_freeze_the_same(tmp_path: Path) -> None:
    result = matching.run(full=False)
    assert all(exact(result).values()), result.claims
    result.finish(full=False)
    written = json.loads(Path(tmp_path, "small", "matching.json").read_text())
    assert written["claims"] == result.claims
    torch_version = written["machine"]["versions"]["torch"]
    assert torch.__version__ in (torch_version, f"{torch_version}+{torch.__version__.partition('+')[2]}")
    assert Path(tmp_path, "small", "matching.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "LBFGS", MUON, "Lookahead (torch-optimizer)"])
def test_optimizer_state_is_that_of_a_model_without_the_frozen_tensors(name: str) -> None:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**optimizer_state.SMALL))
    row = optimizer_state.on_small_model(optimizer_state.factories()[name], model)
    assert [each["ratio"] for each in row["frozen"].values()] == [1, 1, 1]
    assert row["frozen"]["all but the last layer"]["saved"] > 0.5


def test_state_is_counted_once_and_wherever_it_is() -> None:
    model = torch.nn.Linear(3, 5)
    plain = optimizer_state.one_step(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    assert plain == 4 * (15 + 5)
    frozen_opt.freeze_parameters(model, ["bias"], role="policy")
    optimizer = torch.optim.SGD(frozen_opt.trainable_parameters(model), momentum=0.9)
    optimizer.extra = [{"again": optimizer.state}]
    assert optimizer_state.one_step(model, optimizer) == 4 * 15


def test_agreement_sends_names_only_where_they_differ() -> None:
    result = ranks.run(full=False)
    assert all(exact(result).values()), result.claims
    result.finish(full=False)


def test_searching_masters_reads_nothing_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "measure", partial(shrunk, copies.measure))
    result = copies.run(full=False)
    assert all(exact(result).values()), result.claims
    assert len(exact(result)) == 2
    result.finish(full=False)


def shrunk(measure: Callable[..., Any], count: int, elements: int, repeats: int) -> Any:
    return measure(count, elements >> 8, repeats)


@needs_fsdp2_on_cpu
def test_a_step_keeps_what_is_frozen_and_saves_its_gradients_and_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_step, "SMALL", training_step.SMALL | {"hidden": 32, "steps": 1})
    monkeypatch.setattr(
        training_step, "FROZEN", {key: training_step.FROZEN[key] for key in ("nothing", "90 %")}
    )
    result = training_step.run(full=False)
    assert all(exact(result).values()), result.claims
    result.finish(full=False)


def test_the_picture_shows_the_names_that_a_run_froze(tmp_path: Path) -> None:
    overrides = ["trainer.steps=2", "trainer.train_batch_size=16", "trainer.critic=null"]
    overrides += ['trainer.policy.freeze_parameters=["model.layers.1.self_attn.[qk]_norm.weight"]']
    assert picture.draw(overrides, tmp_path / "demo.svg")
    root = ElementTree.parse(tmp_path / "demo.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    lines = [
        unicodedata.normalize("NFKC", "".join(text.itertext())) for text in root.iter(f"{root.tag[:-3]}text")
    ]
    shown = " ".join(lines)
    names = frozen_opt.report("policy").names
    assert len(names) == 2
    assert all(name in shown for name in names)
    for said in ("step=1 ", "step=2 ", "2 of ", "bit-identical after training"):
        assert said in shown


def test_a_claim_that_fails_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    result = common.Result("none", {}, [], common.Figure(), {"true": True, "false": False})
    assert not result.finish(full=False)
    assert "FAILS false" in capsys.readouterr().out
