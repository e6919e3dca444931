"""What planning and freezing costs at start-up, against one bare walk over the parameters.

The reference work is a tree with one tensor per expert projection, on the meta device, as large as
Qwen3-235B-A22B or Kimi-K2; what a layer has beside experts is reduced to six tensors. Timed is all of
`freeze_parameters`, its log included, beside the usual ways, which only match and freeze; then its
parts, one by one; `verify` at a step; and how long `frozen-opt --help` takes.
"""

from __future__ import annotations

import math
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase, translate
from statistics import median
from typing import TypeVar

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import nn

import frozen_opt
from benchmarks.common import Result, command_line, log_to_nowhere, table
from frozen_opt.matching.names import walk
from frozen_opt.matching.patterns import Matcher
from frozen_opt.reports.log import log

T = TypeVar("T")

TREES = {"Qwen3-235B-A22B": (94, 128), "Kimi-K2": (61, 384)}
TARGETS = {1: 0.5, 50: 1.5}
"""Number of patterns -> the most that freezing may cost, in walks."""
VERIFY_TARGET = 0.3
"""The most that `verify` may cost at a step, in walks."""
HELP_TARGET = 0.3
"""Seconds until `frozen-opt --help` is done, less those of an empty Python."""


def tree(layers: int, experts: int) -> nn.Module:
    """A mixture-of-experts model, every tensor of one element."""
    return _module(
        model=_module(
            layers=nn.ModuleList(
                _module(
                    self_attn=_module(q_proj=_leaf(), k_proj=_leaf(), v_proj=_leaf(), o_proj=_leaf()),
                    mlp=_module(
                        gate=_leaf(),
                        experts=nn.ModuleList(
                            _module(gate_proj=_leaf(), up_proj=_leaf(), down_proj=_leaf())
                            for _ in range(experts)
                        ),
                    ),
                    norm=nn.RMSNorm(1, device="meta"),
                )
                for _ in range(layers)
            )
        ),
        lm_head=_leaf(),
    )


def _module(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def _leaf() -> nn.Module:
    return nn.Linear(1, 1, bias=False, device="meta")


def patterns(count: int) -> list[str]:
    """The routers; then, to make up `count`, four of five for experts of a layer, one for its attention."""
    more = count - 1
    attention = more // 5
    return [
        "*.mlp.gate.weight",
        *(f"*.layers.{layer}.mlp.experts.*.gate_proj.weight" for layer in range(more - attention)),
        *(f"*.layers.{layer}.self_attn.*" for layer in range(more - attention, more)),
    ]


def bare_walk(model: nn.Module, globs: Sequence[str]) -> None:
    """The yardstick."""
    sum(1 for _ in model.named_parameters())


def by_frozen_opt(model: nn.Module, globs: Sequence[str]) -> None:
    frozen_opt.freeze_parameters(model, globs, role="policy")


def by_fnmatch(model: nn.Module, globs: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, glob) for glob in globs):
            parameter.requires_grad_(False)


def by_regexes(model: nn.Module, globs: Sequence[str]) -> None:
    regexes = [re.compile(translate(glob)) for glob in globs]
    for name, parameter in model.named_parameters():
        if any(regex.match(name) for regex in regexes):
            parameter.requires_grad_(False)


def by_union(model: nn.Module, globs: Sequence[str]) -> None:
    union = re.compile("|".join(translate(glob) for glob in globs))
    for name, parameter in model.named_parameters():
        if union.match(name):
            parameter.requires_grad_(False)


Way = Callable[[nn.Module, Sequence[str]], None]
WAYS: dict[str, Way] = {
    "bare walk": bare_walk,
    "frozen_opt": by_frozen_opt,
    "fnmatch": by_fnmatch,
    "regexes": by_regexes,
    "union regex": by_union,
}


def thaw(model: nn.Module) -> None:
    """As if nothing had been frozen yet."""
    frozen_opt.reset()
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def timed(way: Way, model: nn.Module, globs: Sequence[str]) -> float:
    """Seconds that one way takes."""
    thaw(model)
    seconds, _ = timing(lambda: way(model, globs))
    return seconds


def breakdown(model: nn.Module, globs: Sequence[str]) -> dict[str, float]:
    """What each part costs, in walks: the walk alone, matching in it, the rest of the plan, and so on."""
    thaw(model)
    whole = timing(lambda: bare_walk(model, ()))[0]
    walk_alone = timing(lambda: walk([model], Matcher([]).start))[0]  # what it finds is not held on to
    walk_and_match = timing(lambda: walk([model], Matcher(globs).start))[0]
    planning, plan = timing(lambda: frozen_opt.plan_freezing(model, globs, role="policy"))
    applying, report = timing(plan.apply)
    logging, _ = timing(lambda: log(report, (), None))
    report.verify(model)  # the first look, which walks
    looking, _ = timing(lambda: report.verify(model))
    taken = {
        "walk": walk_alone,
        "match": walk_and_match - walk_alone,
        "plan": planning - walk_and_match,
        "apply": applying - logging,
        "log": logging,
        "verify": looking,
    }
    return {part: each / whole for part, each in taken.items()}


def timing(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds of this thread, so that a busy machine does not count (nothing here waits); and the result."""
    start = time.thread_time()
    result = work()
    return time.thread_time() - start, result


def help_seconds(repeats: int) -> float:
    """How much longer `frozen-opt --help` takes than a Python that does nothing, in CPU time."""

    def taken(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return median(taken("-m", "frozen_opt", "--help") - taken("-c", "") for _ in range(repeats))


def frozen(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def run(full: bool) -> Result:
    """Small: the Qwen tree alone, at two sizes, and the usual ways timed once."""
    trees = TREES if full else dict(list(TREES.items())[:1])
    parts = (16, 4, 1) if full else (4, 1)  # the targets are those of the whole tree
    repeats, slow_repeats = (11, 1) if full else (7, 1)
    measured = []
    same = True
    for name, part in track([(name, part) for name in trees for part in parts], "matching"):
        layers, experts = TREES[name]
        model = tree(layers, experts // part)
        parameters = sum(1 for _ in model.parameters())
        for count in (1, 10, 50):
            globs = patterns(count)
            with log_to_nowhere():
                times: dict[str, list[float]] = {way: [] for way in WAYS}
                for repeat in range(repeats):
                    for way, function in WAYS.items():
                        if way in ("bare walk", "frozen_opt") or repeat < slow_repeats:
                            times[way].append(timed(function, model, globs))
                            names = frozen(model) if way != "bare walk" and repeat == 0 else None
                            if way == "frozen_opt" and repeat == 0:
                                expected = names
                            elif names is not None:
                                same = same and names == expected
            with log_to_nowhere():
                parts_of_it = [breakdown(model, globs) for _ in range(repeats)]
            taken = {way: median(each) for way, each in times.items()}
            # Each against the walk right before it, since a shared machine changes its pace.
            ratios = {
                way: median(a / b for a, b in zip(each, times["bare walk"], strict=False))
                for way, each in times.items()
            }
            measured.append(
                {
                    "tree": name,
                    "part": part,
                    "parameters": parameters,
                    "patterns": count,
                    "seconds": taken,
                    "ratio": ratios,
                    "breakdown": {
                        part: median(each[part] for each in parts_of_it) for part in parts_of_it[0]
                    },
                }
            )
    largest = [row for row in measured if row["part"] == parts[-1]]
    claims = {"all ways freeze the same parameters": same}
    for row in largest:
        if (target := TARGETS.get(row["patterns"])) is not None:
            claim = f"{row['tree']}, patterns: {row['patterns']}, cost: at most {target} of a bare walk"
            claims[claim] = row["ratio"]["frozen_opt"] <= target
            claim = (
                f"{row['tree']}, patterns: {row['patterns']}, cost: verify at most {VERIFY_TARGET} of a walk"
            )
            claims[claim] = row["breakdown"]["verify"] <= VERIFY_TARGET
    for name in trees:
        growth = exponent([row for row in measured if row["tree"] == name and row["patterns"] == 50])
        claims[f"{name}: time grows as parameters^{growth:.2f}, no faster than parameters^1.15"] = (
            growth < 1.15
        )
    help_takes = help_seconds(repeats)
    claims[f"frozen-opt --help, cost: at most {HELP_TARGET} s"] = help_takes <= HELP_TARGET
    return Result(
        "matching",
        {"measured": measured, "help_seconds": help_takes},
        [
            table(
                "Planning and freezing, in bare walks over named_parameters()",
                ["tree", "parameters", "patterns", "bare walk", *list(WAYS)[1:]],
                [
                    (
                        row["tree"],
                        f"{row['parameters']:,}",
                        row["patterns"],
                        f"{row['seconds']['bare walk'] * 1e3:.0f} ms",
                        *(f"{row['ratio'][way]:.2f}×" for way in list(WAYS)[1:]),
                    )
                    for row in largest
                ],
            ),
            table(
                "Where that goes, and verify at a step, in the same walks",
                ["tree", "patterns", *largest[0]["breakdown"]],
                [
                    (row["tree"], row["patterns"], *(f"{cost:.2f}" for cost in row["breakdown"].values()))
                    for row in largest
                ],
            ),
        ],
        plot([row for row in measured if row["patterns"] == 50]),
        claims,
    )


def exponent(rows: Sequence[dict]) -> float:
    """The k of time = c · parameters^k, from the smallest tree (the first row) to the largest."""
    first, last = rows[0], rows[-1]
    return math.log(last["seconds"]["frozen_opt"] / first["seconds"]["frozen_opt"]) / math.log(
        last["parameters"] / first["parameters"]
    )


def plot(rows: Sequence[dict]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = sorted(rows, key=lambda row: row["parameters"])
    for way, style in zip(WAYS, ("k--", "o-", "s-", "^-", "v-"), strict=True):
        axes.loglog(
            [row["parameters"] for row in rows],
            [row["seconds"][way] for row in rows],
            style,
            label=way,
            linewidth=3 if way == "frozen_opt" else 1.5,
        )
    axes.set_xlabel("parameters (tensors) of the model")
    axes.set_ylabel("CPU time (seconds)")
    axes.set_title("Freezing by 50 patterns takes about as long as one walk over the model")
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(run)
