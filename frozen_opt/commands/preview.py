"""`frozen-opt preview`: what patterns would freeze, and save, with no GPU and no weights loaded.

The model is built on the meta device, or from the names and shapes in safetensors headers, and asked with
`plan_freezing`, as at start-up. Optimizer state is measured by a real step on tensors without memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from frozen_opt.commands.bad_input import BadInput, first_line
from frozen_opt.commands.models import call_factory, open_model
from frozen_opt.commands.optimizer_state import Unmeasurable, state_bytes
from frozen_opt.commands.yaml_input import read_config
from frozen_opt.config import has, lookup, read_patterns
from frozen_opt.errors import FreezingError, printable
from frozen_opt.matching.braces import fold
from frozen_opt.parameters import named_parameters
from frozen_opt.plan import plan_freezing
from frozen_opt.planning.collector import without_collector
from frozen_opt.planning.freeze_plan import FreezePlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Preview:
    """What a role would freeze."""

    plan: FreezePlan
    optimizer: str
    state_bytes: Mapping[str, int] | None
    """`without_freezing` and `with_freezing`; None where that can't be told."""
    unknown: str = ""
    """Why it can't."""


class Request(NamedTuple):
    """What the command line asks for."""

    words: Sequence[str]
    """The model, unless there is a factory, and patterns."""
    factory: str | None
    config: Path | None
    role: str | None
    optimizer: str | None
    dtype: str
    master_weights: bool
    as_json: bool
    expect: int | None
    fail_under: int | None
    trust_remote_code: bool


def run(request: Request) -> int:
    """Print what is asked for; the exit code of `frozen-opt preview`."""
    try:
        with without_collector():
            count, text = _answer(request)
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    except (BadInput, FreezingError, OSError, RecursionError, MemoryError) as error:
        print(f"frozen-opt: {printable(str(error)) or type(error).__name__}", file=sys.stderr)
        return 2
    return _missed(count, request.expect, request.fail_under)


def _answer(request: Request) -> tuple[int, str]:
    """How many parameters would be frozen, and all that there is to say."""
    patterns, source = list(request.words), ""
    if request.dtype not in DTYPES:
        raise BadInput(f"--dtype is {request.dtype!r}, and must be one of {', '.join(DTYPES)}")
    if request.factory is None:
        if not patterns:
            raise BadInput("no MODEL: give a config.json, a safetensors file, or --factory module:function")
        source = patterns.pop(0)
    wanted = _wanted(patterns, request.config, request.role, request.optimizer)
    model, complete = (
        call_factory(request.factory) if request.factory else open_model(source, request.trust_remote_code)
    )
    dtype = DTYPES[request.dtype]
    previews = [_preview(model, complete, each, dtype, request.master_weights) for each in wanted]
    text = _as_json(previews, complete) if request.as_json else _as_text(model, previews, complete)
    return sum(each.plan.parameter_count for each in previews), text


def _missed(count: int, expect: int | None, fail_under: int | None) -> int:
    if expect is not None and count != expect:
        print(f"frozen-opt: {count} parameters would be frozen, not {expect}", file=sys.stderr)
        return 1
    if fail_under is not None and count < fail_under:
        print(f"frozen-opt: {count} parameters would be frozen, fewer than {fail_under}", file=sys.stderr)
        return 1
    return 0


# What is wanted


class Wanted(NamedTuple):
    """What is asked of one role."""

    role: str
    patterns: list[str]
    optimizer: str
    options: Mapping[str, Any]


def _wanted(patterns: list[str], path: Path | None, role: str | None, optimizer: str | None) -> list[Wanted]:
    if path is None:
        if not patterns:
            raise BadInput("no patterns: name some after MODEL, or give --config")
        return [Wanted(role or "policy", patterns, optimizer or "AdamW", {})]
    if patterns:
        raise BadInput("patterns come from the command line or from --config, not from both")
    try:
        config = read_config(path)
        return [
            Wanted(each, read_patterns(config, each), *_optimizer(config, each, optimizer))
            for each in _roles(config, role)
        ]
    except (BadInput, FreezingError):
        raise
    except Exception as error:  # of OmegaConf, which resolves ${...} when it is asked
        raise BadInput(f"{path} is no config: {first_line(error)}") from error


def _roles(config: Any, role: str | None) -> list[str]:
    if role is not None:
        return [role]
    for node in (lookup(config, "trainer"), config):
        if isinstance(node, Mapping) and (roles := [str(key) for key in node if _is_role(lookup(node, key))]):
            return roles
    if _is_role(config):
        return ["policy"]
    raise BadInput("the config has no role with freeze_parameters or optimizer_config: name one with --role")


def _is_role(node: Any) -> bool:
    return isinstance(node, Mapping) and (has(node, "freeze_parameters") or has(node, "optimizer_config"))


def _optimizer(config: Any, role: str, optimizer: str | None) -> tuple[str, Mapping[str, Any]]:
    node = lookup(lookup(config, "trainer"), role) or lookup(config, role) or config
    settings = lookup(node, "optimizer_config")
    stated = str(lookup(settings, "optimizer") or "AdamW")
    if optimizer not in (None, stated):
        return str(optimizer), {}
    return stated, dict(lookup(settings, "optimizer_kwargs") or {})


# What it would freeze, and save


def _preview(
    model: nn.Module, complete: bool, wanted: Wanted, dtype: torch.dtype, master_weights: bool
) -> Preview:
    plan, optimizer = plan_freezing(model, wanted.patterns, role=wanted.role), wanted.optimizer
    if not complete:
        return Preview(plan, optimizer, None, "shards are missing, and with them shapes")
    names = set(plan.names)
    frozen = {id(parameter) for name, parameter in named_parameters(model) if name in names}
    try:
        sizes = state_bytes(model, optimizer, wanted.options, torch.float32 if master_weights else dtype)
    except Unmeasurable as error:
        return Preview(plan, optimizer, None, str(error))
    if master_weights and dtype != torch.float32:
        sizes = [(parameter, size + 4 * parameter.numel()) for parameter, size in sizes]
    return Preview(
        plan,
        optimizer,
        {
            "without_freezing": sum(size for _, size in sizes),
            "with_freezing": sum(size for parameter, size in sizes if id(parameter) not in frozen),
        },
    )


# How it is shown


def _as_json(previews: Sequence[Preview], complete: bool) -> str:
    return json.dumps(
        {
            each.plan.role: {
                "patterns": list(each.plan.patterns),
                "matches": dict(each.plan.matches),
                "names": list(each.plan.names),
                "parameter_count": each.plan.parameter_count,
                "element_count": each.plan.element_count if complete else None,
                "optimizer": each.optimizer,
                "optimizer_state_bytes": each.state_bytes,
                "warnings": list(each.plan.warnings),
            }
            for each in previews
        },
        indent=2,
    )


def _as_text(model: nn.Module, previews: Sequence[Preview], complete: bool) -> str:
    parameters = {id(parameter): parameter.numel() for _, parameter in named_parameters(model)}
    return "\n\n".join(_block(each, len(parameters), sum(parameters.values()), complete) for each in previews)


def _block(preview: Preview, parameters: int, elements: int, complete: bool) -> str:
    plan = preview.plan
    lines = [f"{printable(plan.role)}", "  matches  pattern"]
    lines += [f"  {plan.matches[pattern]:7,}  {printable(pattern)}" for pattern in plan.patterns]
    lines.append(f"  frozen   {_share(plan.parameter_count, parameters)} parameters")
    if complete:
        lines.append(f"           {_share(plan.element_count, elements)} elements")
    lines += [f"           {printable(name)}" for name in fold(plan.names)]
    lines += [
        f"           {printable(name)} = {printable(', '.join(tied))}" for name, tied in plan.ties.items()
    ]
    if preview.state_bytes is None:
        lines.append(f"  state    of {preview.optimizer} unknown: {printable(preview.unknown)}")
    else:
        before, after = preview.state_bytes["without_freezing"], preview.state_bytes["with_freezing"]
        lines.append(
            f"  state    of {preview.optimizer}: {_size(after)} in place of {_size(before)}, "
            f"{_size(before - after)} saved"
        )
    lines += [f"  warning  {printable(text)}" for text in plan.warnings]
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / max(whole, 1):.2%})"


def _size(count: int) -> str:
    unit = next((unit for unit in (1 << 30, 1 << 20, 1 << 10) if count >= unit), 1)
    return f"{count / unit:,.1f} {_UNITS[unit]}" if unit > 1 else f"{count} B"


_UNITS = {1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB"}
