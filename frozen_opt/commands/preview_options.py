"""The options of `frozen-opt preview`, without what it takes to answer them, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL [PATTERN]...",
        help="A folder with a config.json, such a file, a .safetensors file, or a checkpoint's "
        "model.safetensors.index.json; then patterns. With --factory, patterns alone.",
        show_default=False,
    ),
]
_Factory = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Call this for the model, on the meta device."),
]
_Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read the patterns from this YAML config.")
]
_Role = Annotated[
    str | None, typer.Option(help="Of the config, this role alone; all by default.", show_default=False)
]
_Optimizer = Annotated[
    str | None,
    typer.Option(
        help="Measure the state of this one, of torch.optim or torch-optimizer. By default the "
        "config's, or AdamW.",
        show_default=False,
    ),
]
_Dtype = Annotated[str, typer.Option(help="Of the trained parameters: float32, bfloat16 or float16.")]
_MasterWeights = Annotated[
    bool, typer.Option("--master-weights", help="The optimizer keeps float32 copies, and steps these.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
_Expect = Annotated[int | None, typer.Option(metavar="N", help="Exit with 1 unless N parameters are frozen.")]
_FailUnder = Annotated[
    int | None, typer.Option(metavar="N", help="Exit with 1 if fewer than N parameters are frozen.")
]
_TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
]


def preview(
    arguments: _Words = None,
    factory: _Factory = None,
    config: _Config = None,
    role: _Role = None,
    optimizer: _Optimizer = None,
    dtype: _Dtype = "float32",
    master_weights: _MasterWeights = False,
    as_json: _AsJson = False,
    expect: _Expect = None,
    fail_under: _FailUnder = None,
    trust_remote_code: _TrustRemoteCode = False,
) -> int:
    """Show what patterns would freeze, and save, without a GPU and without loading weights.

    Exits with 0, with 1 if an expectation is missed, with 2 on bad input. Nothing is downloaded.

        frozen-opt preview ./Qwen3-30B-A3B '*.mlp.gate.weight'

        frozen-opt preview MODEL --config run.yaml --role policy --expect 48
    """
    from frozen_opt.commands.preview import Request, run

    words = arguments or []
    return run(
        Request(
            words,
            factory,
            config,
            role,
            optimizer,
            dtype,
            master_weights,
            as_json,
            expect,
            fail_under,
            trust_remote_code,
        )
    )
