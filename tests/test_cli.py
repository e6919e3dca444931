"""The command line: help, exit codes, and one clear message for whatever is wrong with the input."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from frozen_opt import cli

SMALL = ["trainer.steps=1", "trainer.train_batch_size=4"]
OPTIMIZER = "trainer.policy.optimizer_config."


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stepz=3", "unknown key"),
        ("steps=3", "unknown key"),
        ("=3", "unknown key"),
        ("trainer.polcy.freeze_parameters=[]", "unknown key"),
        ("model.num_layers=3", "unknown key"),
        ("trainer.steps", "malformed"),
        ("trainer.steps=[1", "malformed"),
        (
            "trainer.policy.freeze_parameters=[*.mlp.gate.weight]",
            "column 2: without quotes * begins an alias",
        ),
        ('trainer.policy.freeze_parameters=["*", !lm_head.*]', "column 7: without quotes ! begins a tag"),
        ("trainer.policy.freeze_parameters=[[01].weight]", "column 2: without quotes [ begins a list"),
        ("trainer.policy.optimizer_config={lr: 1, lr: 2}", "column 9: found duplicate key lr"),
        ("trainer.policy.freeze_parameters=" + "[" * 60 + "]" * 60, "too large: more than"),
        (OPTIMIZER + "optimizer_kwargs={a: '${.b}${.b}', b: '${.c}" + "${.c}" * 2000 + "'}", "malformed"),
        ("trainer.policy.freeze_parameters=${nowhere}", "malformed"),
        ("trainer.policy.freeze_parameters={a: 1}", "malformed"),
        ("trainer.steps=many", "of type int"),
        ("trainer.steps=true", "of type int"),
        ("trainer.steps=1.5", "of type int"),
        ("trainer.steps=", "of type int"),
        ("trainer.steps=0", "1 or more"),
        ("trainer.policy=null", "of type dict"),
        (OPTIMIZER + "lr=high", "of type float"),
        (OPTIMIZER + "lr=-1", "0 or more"),
        (OPTIMIZER + "lr=.nan", "0 or more"),
        (OPTIMIZER + "lr=.inf", "diverged"),
        (OPTIMIZER + "adam_betas=[0.9]", "these settings"),
        (OPTIMIZER + "optimizer=NoSuch", "NoSuch"),
        (OPTIMIZER + "optimizer=LBFGS", "closure"),
        (OPTIMIZER + "optimizer_kwargs={foo: 1}", "foo"),
        ("model.num_experts_per_tok=9", "these settings"),
        ("model.head_dim=15", "these settings"),
        ("environment.env_class=chess", "'sort'"),
        ("trainer.strategy=magic", "'torch'"),
        ("trainer.device=nowhere", "these settings"),
        ('trainer.policy.freeze_parameters=["*.mlp.gates.weight"]', "model.layers.0.mlp.gate.weight"),
        ("trainer.policy.freeze_parameters=*.weight", "malformed"),
        ("trainer.policy.freeze_parameters=routers", "must be a list"),
        ('trainer.policy.freeze_parameters=["*"]', "nothing is left to train"),
        ('trainer.critic.freeze_parameters=["!*"]', "carve-out"),
        ("--no-such-option", "No such option"),
        ("--\x1b[31m", r"--\x1b[31m"),
    ],
)
def test_bad_input(override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    own = [small for small in SMALL if small.partition("=")[0] != override.partition("=")[0]]
    assert cli.main(["demo", "--out", str(out), *own, override]) == 2
    said = capsys.readouterr().err
    assert said.startswith("frozen-opt: ")
    assert message in said
    assert "Traceback" not in said
    assert said.count("\n") <= 3


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["thaw"]) == 2
    assert "'thaw'" in capsys.readouterr().err


def test_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "file"
    out.touch()
    assert cli.main(["demo", *SMALL, "--out", str(out)]) == 2
    assert str(out) in capsys.readouterr().err


def test_a_frozen_tensor_that_moved_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("frozen_opt.demo.run.run", lambda overrides, out: False)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"], ["demo", "-h"]])
def test_help_fits_80_columns(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "demo" in said
    assert all(len(line) <= 80 for line in said.splitlines() if "demo.yaml" not in line)


@pytest.mark.parametrize("package", ["typer", "omegaconf", "transformers", "rich"])
def test_says_which_extra_is_missing(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if package == "typer":
        monkeypatch.setattr(cli, "typer", None)
    else:
        for name in [name for name in sys.modules if name.startswith((f"{package}.", "frozen_opt.demo."))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)  # import then raises ModuleNotFoundError
    assert cli.main(["demo", *SMALL, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == f"frozen-opt: this needs {package}: pip install 'frozen_opt[demo]'\n"


def test_script_is_declared() -> None:
    (script,) = entry_points(group="console_scripts", name="frozen-opt")
    assert script.load() is cli.main


def python(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250
    )


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from frozen_opt.cli import main; main(['demo', '--help']); "
        "print(sorted({'transformers', 'omegaconf', 'torch_optimizer', 'deepspeed'} & set(sys.modules)))"
    )
    assert python("-c", code, cwd=tmp_path).stdout.splitlines()[-1] == "[]"


def test_as_a_program(tmp_path: Path) -> None:
    done = python("-m", "frozen_opt", "demo", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    log = done.stderr
    assert "model.layers.0.mlp.gate.weight, model.layers.1.mlp.gate.weight" in log
    assert "model.embed_tokens.weight" in log
    assert "policy/frozen_parameter_count=2" in done.stdout
    assert "bit-identical" in done.stdout
    (row,) = (tmp_path / "frozen-opt-demo" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["critic/frozen_parameter_count"] == 1


def test_as_a_program_with_bad_input(tmp_path: Path) -> None:
    done = python("-m", "frozen_opt", "demo", 'trainer.policy.freeze_parameters=["nowhere"]', cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "'nowhere'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "frozen-opt-demo").exists()
