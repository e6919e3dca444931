"""The demo on two ranks: the counts of one process, one voice, and no frozen tensor that moves unseen."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from frozen_opt import cli
from frozen_opt.commands.bad_input import BadInput
from frozen_opt.demo import config as demo_config
from frozen_opt.demo import learners as demo_learners
from frozen_opt.demo import ppo as demo_ppo
from frozen_opt.demo import run as demo_run
from frozen_opt.demo.backends import launched, wrap_deepspeed
from frozen_opt.parameters import resting_parameters
from tests.ranks.launch import build_extensions, run_ranks
from tests.versions import needs_fsdp2_on_cpu, needs_muon

SMALL = ["trainer.steps=2", "trainer.train_batch_size=16"]
STRATEGIES = ["ddp", "fsdp2", "deepspeed"]
OPTIMIZER = "trainer.policy.optimizer_config."


def torchrun(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """`torchrun --nproc-per-node 2 -m frozen_opt demo ...`, on a free port; dead when this returns."""
    build_extensions()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "frozen_opt", "demo", *SMALL, *arguments]
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=200)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks are in its group
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def counts(row: dict[str, Any]) -> dict[str, int]:
    return {key: value for key, value in row.items() if "/frozen_" in key}


def moved(said: str) -> list[tuple[str, str]]:
    """Of each role, how many trainable parameters moved, and how many there are."""
    return re.findall(r"trainable ones moved\W+(\d+) of (\d+)", said)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The metrics of a single process, and what it printed."""
    out, said = tmp_path_factory.mktemp("alone"), io.StringIO()
    with redirect_stdout(said):
        assert demo_run.run(SMALL, out)
    return rows(out), said.getvalue()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2_on_cpu), "deepspeed"])
def test_by_torchrun(strategy: str, tmp_path: Path, alone: tuple[list[dict[str, Any]], str]) -> None:
    expected, said = alone
    done = torchrun(f"trainer.strategy={strategy}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "frozen-opt-demo")
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    assert [counts(row) for row in found] == [counts(row) for row in expected]
    assert len(counts(found[0])) == 4
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("step=")] == ["step=1", "step=2"]
    for role in ("policy", "critic"):
        assert sum(line.startswith(f"{role}, on 2 ranks together") for line in lines) == 1
        assert done.stderr.count(f"{role}: froze") == 1
    held = [line.split("│")[2].strip() for line in lines if "bit-identical" in line]
    assert held == ["yes", "yes"]
    assert moved(done.stdout) == moved(said)
    assert [some == of for some, of in moved(said)] == [True, True]


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    # Rank 0 fails alone, and the other one in a collective
    done = torchrun("trainer.strategy=ddp", "--out", "a file", cwd=tmp_path)
    assert done.returncode != 0
    (said,) = re.findall(r"^frozen-opt: .*$", done.stderr, re.MULTILINE)
    assert "a file" in said
    assert "[rank" not in done.stderr  # what torch writes before the lines of an uncaught exception
    codes = re.findall(r"exitcode  : (\S+)", done.stderr)
    assert "2" in codes
    assert set(codes) <= {"2", "-15"}  # torchrun ends those that are slower
    assert "parameters frozen" not in done.stdout


def train(out: Path, overrides: list[str], meddle: bool) -> dict[str, Any]:
    """A run on ranks that are up already, in which rank 1 may move one element of its frozen tensors."""
    config = demo_config.load_config([*SMALL, *overrides])
    learners: dict[str, demo_learners.Learner] = {}
    make, step = demo_learners.make_learners, demo_ppo.ppo_step

    def keep(config: Any) -> dict[str, demo_learners.Learner]:
        learners.update(make(config))
        return learners

    def step_and_meddle(*args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = step(*args, **kwargs)
        if meddle and dist.get_rank() == 1:
            parameters, backend = resting_parameters(learners["critic"].model)
            backend.elements(parameters["model.embed_tokens.weight"]).view(-1)[-1] += 1e-6
        return metrics

    said = io.StringIO()
    with (
        mock.patch.object(demo_run, "make_learners", keep),
        mock.patch.object(demo_run, "ppo_step", step_and_meddle),
        redirect_stdout(said),
    ):
        held = demo_run.train(config, out)
    return {
        "held": held,
        "said": said.getvalue(),
        "astray": demo_learners.moved(learners["critic"], frozen=True) if "critic" in learners else [],
        "bytes": [demo_learners.state_bytes(learner.optimizer) for learner in learners.values()],
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_moves_on_one_rank_is_known_on_all(strategy: str, tmp_path: Path) -> None:
    first, other = run_ranks(train, 2, tmp_path, [f"trainer.strategy={strategy}"], True, timeout=120)
    assert not first["held"]
    assert not other["held"]
    assert first["astray"] == other["astray"] == ["model.embed_tokens.weight"]
    assert "no: " in first["said"]
    assert other["said"] == ""


def run_all(out: Path) -> list[Any]:
    return [train(out / strategy, [f"trainer.strategy={strategy}"], False) for strategy in STRATEGIES]


@needs_fsdp2_on_cpu
def test_every_strategy_learns_alike(tmp_path: Path) -> None:
    results, _ = run_ranks(run_all, 2, tmp_path, timeout=120)
    assert all(result["held"] for result in results)
    expected, *others = (rows(tmp_path / strategy) for strategy in STRATEGIES)
    for found in others:
        for row, other in zip(expected, found, strict=True):
            assert row == pytest.approx(other, rel=1e-3)
    # AdamW's two averages: with DDP on each rank, else once. Its step counts and ZeRO's padding come on top.
    ddp, fsdp2, deepspeed = (result["bytes"] for result in results)
    for role, elements in enumerate((57_040 - 384, 56_560 - 528)):
        for sizes, copies in ((ddp, 2), (fsdp2, 1), (deepspeed, 1)):
            assert 0 <= sizes[role] - copies * 8 * elements <= 2 * 2 * 4 * 25 + 64


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ["trainer.strategy=fsdp2", "trainer.critic=null", OPTIMIZER + "optimizer=Muon"], marks=needs_muon
        ),
        ["trainer.strategy=ddp", "trainer.critic=null", OPTIMIZER + "max_grad_norm=0.0"],
        ["trainer.strategy=deepspeed", "trainer.critic=null", OPTIMIZER + "max_grad_norm=0.0"],
    ],
)
def test_one_rank_is_like_one_process(overrides: list[str], tmp_path: Path) -> None:
    (result,) = run_ranks(train, 1, tmp_path / "rank", overrides, False, timeout=120)
    assert result["held"]
    assert demo_run.run([*SMALL, *overrides, "trainer.strategy=torch"], tmp_path / "process")
    for row, other in zip(rows(tmp_path / "rank"), rows(tmp_path / "process"), strict=True):
        assert row == pytest.approx(other, rel=1e-3)


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (
            ["trainer.strategy=fsdp2"],
            {},
            "torchrun --nproc-per-node 2 -m frozen_opt demo trainer.strategy=fsdp2",
        ),
        ([], LAUNCHED, "one of ['ddp', 'fsdp2', 'deepspeed']"),
        (["trainer.strategy=ddp", "trainer.train_batch_size=7"], LAUNCHED, "a multiple of 2"),
        (["trainer.strategy=ddp", "trainer.device=nowhere"], LAUNCHED, "trainer.device=nowhere"),
        (["trainer.strategy=ddp", "trainer.device=cpu:0"], LAUNCHED, "write cpu"),
    ],
)
def test_what_does_not_fit_the_launch(
    overrides: list[str], environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in LAUNCHED:
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(BadInput, match=re.escape(message)), launched(demo_config.load_config(overrides)):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_ranks_on_a_device_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in LAUNCHED.items():
        monkeypatch.setenv(key, value)
    config = demo_config.load_config(["trainer.strategy=ddp", "trainer.device=cuda"])
    with pytest.raises(BadInput, match="there is none"), launched(config):
        pass


def test_deepspeed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # import then raises ModuleNotFoundError
    with pytest.raises(BadInput, match="pip install deepspeed"):
        wrap_deepspeed(torch.nn.Linear(1, 1), None)


def test_the_first_to_fail_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True)
    for key, value in {**LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["demo", "--no-such-option"]) == 2
        assert ("No such option" in capsys.readouterr().err) == (rank == "1")
    monkeypatch.setattr("frozen_opt.demo.run.run", mock.Mock(side_effect=RuntimeError("closed by peer")))
    assert cli.main(["demo"]) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RuntimeError, match="closed by peer"):
        cli.main(["demo"])


@needs_fsdp2_on_cpu
def test_a_schedule_on_fsdp2_ranks(tmp_path: Path, alone: tuple[list[dict[str, Any]], str]) -> None:
    done = torchrun(
        "trainer.strategy=fsdp2", "trainer.steps=3", "trainer.policy.freeze_schedule={2: []}", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "frozen-opt-demo")
    assert [row["policy/frozen_parameter_count"] for row in found] == [2, 0, 0]
    assert done.stderr.count("policy: thawed 2 parameters: model.layers.{0..1}.mlp.gate.weight") == 1
    (_, policy), critic = moved(alone[1])
    thawed = str(int(policy) + 2)
    assert moved(done.stdout) == [(thawed, thawed), critic]
