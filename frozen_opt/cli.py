"""The `frozen-opt` command. A subcommand imports what it needs when it is called, so that help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError:  # an extra brings it; main() says so
    typer = None  # type: ignore[assignment]

from frozen_opt.commands.bad_input import BadInput
from frozen_opt.errors import FreezingError, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and give its exit code: 2 for bad input, with a message on standard error."""
    if typer is None:
        return _refuse(_EXTRA_MISSING.format("typer"))
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code: int = _app()(list(arguments) or ["--help"], prog_name="frozen-opt", standalone_mode=False)
        return code
    except typer.Abort:
        return 130  # what shells give for Ctrl-C
    except _click_error() as error:
        return _refuse(f"{error.format_message()}\nTry 'frozen-opt --help'.")


def _app() -> typer.Typer:
    from frozen_opt.commands.preview_options import preview

    app = typer.Typer(
        help="Freeze chosen parameters of a model by config, and prove that they stayed.",
        add_completion=False,
        rich_markup_mode=None,  # it would read the brackets of a pattern list as markup
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(help=_DEMO, short_help="Train a small model by PPO, parts of it frozen.")(demo)
    app.command(short_help="Show what patterns would freeze and save, without loading weights.")(preview)
    return app


_DEMO = f"""\
Train a small model by PPO on this CPU, some of its parameters frozen.

A Qwen3-MoE policy and its critic learn to sort a few digits, in less than a
minute. In the end a table for each role says how many parameters were frozen,
whether they are bit for bit what they were, and what optimizer state that saved.

\b
OVERRIDES change the config, which is in MarinSkyRL's layout, in YAML:
  frozen-opt demo 'trainer.policy.freeze_parameters=["*.mlp.gate.weight"]'
  frozen-opt demo trainer.critic=null trainer.policy.optimizer_config.lr=1e-3

\b
On several ranks, with DDP, FSDP2 or DeepSpeed:
  torchrun --nproc-per-node 2 -m frozen_opt demo trainer.strategy=fsdp2

\b
Every key and its value:
  {Path(__file__).with_name("demo") / "demo.yaml"}
Exit code: 0, 1 if a frozen parameter moved, 2 for bad input.
"""


def demo(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for metrics.jsonl.")] = Path("frozen-opt-demo"),
) -> int:
    """The `demo` subcommand."""
    try:
        from frozen_opt.demo.run import run
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in {"omegaconf", "rich", "transformers"}:
            raise
        return _refuse(_EXTRA_MISSING.format(package))
    try:
        return 0 if run(overrides or [], out) else 1
    except (BadInput, FreezingError, OSError) as error:
        return _refuse(str(error))
    except Exception:
        if _first_to_fail():
            raise
        return 2  # the rank that failed first has broken this one's connection, and has said why


_EXTRA_MISSING = "this needs {}: pip install 'frozen_opt[demo]'"


def _refuse(message: str) -> int:
    if _first_to_fail():
        lines = [printable(line) for line in message.splitlines()]
        print("frozen-opt: " + "\n".join(lines), file=sys.stderr, flush=True)
    return 2


def _first_to_fail() -> bool:
    """Whether no other rank of the same torchrun has failed yet.

    The first one speaks, not rank 0: once it has exited, torchrun ends the others. Where ranks share no
    store of torchrun's, or can't reach it, each speaks: better twice than not at all.
    """
    environment = os.environ
    if environment.get("WORLD_SIZE", "1") == "1" or "TORCHELASTIC_USE_AGENT_STORE" not in environment:
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is exported, and documented

    try:
        store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
        failed: int = store.add(f"frozen-opt failed {environment.get('TORCHELASTIC_RESTART_COUNT')}", 1)
    except RuntimeError:
        return True
    return failed == 1


def _click_error() -> Any:
    """The base of click's errors: of typer's own copy of click or, in older versions, of click itself."""
    return typer.BadParameter.__mro__[2]
