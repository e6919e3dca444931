"""The README is true: every snippet and every command in it runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.launch import run_ranks
from tests.ranks.test_megatron_bridge import auto_bridge, load
from tests.ranks.test_megatron_bridge import bridge as bridge
from tests.versions import needs_fsdp2_on_cpu

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def run_snippets(folder: str, megatron_bridge: str | None) -> dict[str, int]:
    """Run the snippets one after the other, as a reader would paste them, and count what they froze.

    Those for Megatron run on their own, with the objects of Megatron-Bridge that they speak of.
    """
    os.chdir(folder)
    Path("config.yaml").write_text(blocks("yaml")[0])
    namespace: dict[str, object] = {}
    if megatron_bridge:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        import frozen_opt

        provider, _ = load(Path(megatron_bridge))
        parallel_state.initialize_model_parallel()
        provider.finalize()
        namespace |= {
            "provider": provider,
            "bridge": auto_bridge(),
            "ddp_config": DistributedDataParallelConfig(),
            "optimizer_config": OptimizerConfig(optimizer="adam", lr=1e-2),
            "with_freezing": frozen_opt.with_freezing,
        }
    for snippet in blocks("python"):
        if ("megatron" in snippet) == bool(megatron_bridge):
            exec(compile(snippet, "README.md", "exec"), namespace)
    from frozen_opt import metrics

    return metrics()


def test_the_snippets_run_in_order(tmp_path: Path) -> None:
    (counts,) = run_ranks(run_snippets, 1, str(tmp_path), None, timeout=120)
    assert counts["policy/frozen_parameter_count"] == 1  # by its last list: the embeddings
    assert counts["actor/frozen_parameter_count"] == 2


def test_the_megatron_snippets_run(tmp_path: Path, bridge: Path) -> None:
    (counts,) = run_ranks(run_snippets, 1, str(tmp_path), str(bridge), timeout=120)
    assert counts["policy/frozen_parameter_count"] == 2


def commands(name: str) -> list[str]:
    return [block.strip() for block in blocks("") if block.startswith(name)]


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A folder with the files that the commands speak of."""
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0])
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return tmp_path


def run_command(command: str, folder: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", commands("frozen-opt preview"))
def test_the_preview_commands_run(command: str, reader: Path) -> None:
    assert run_command(command, reader).strip() == blocks("text")[0].strip()


@needs_fsdp2_on_cpu
@pytest.mark.parametrize("command", commands("torchrun"))
def test_the_command_for_ranks_runs(command: str, reader: Path) -> None:
    printed = run_command(f"{command.replace('torchrun', 'torchrun --standalone')} trainer.steps=1", reader)
    assert printed.count("frozen ones bit-identical after training") == 2


def test_every_command_is_one_that_the_tests_know() -> None:
    known = ("pip install", "frozen-opt preview", "torchrun", "python -m benchmarks")
    assert [block for block in blocks("") if not block.startswith(known)] == []
    assert len(commands("frozen-opt preview")) == 2
    assert len(commands("torchrun")) == 1


def test_the_commands_for_a_fresh_machine_name_the_tested_torch() -> None:
    import torch

    commands = [block for block in blocks("") if block.startswith("pip install")]
    assert [re.findall(r"'\.\[(\w+)\]' && (.*)", command)[0] for command in commands] == [
        ("demo", "frozen-opt demo"),
        ("test", "pytest"),
        ("bench", "python -m benchmarks"),
    ]
    version = torch.__version__.split("+")[0]
    assert all(f"torch=={version} " in command for command in commands)


@pytest.mark.parametrize("row", re.findall(r"^\| .* \| `(\[.*\])` \|$", TEXT, re.MULTILINE))
def test_the_example_patterns_select_something(row: str) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import frozen_opt

    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        )
    )  # fmt: skip
    assert frozen_opt.freeze_parameters(model, eval(row), role="policy").parameter_count > 0
