"""What the search for copies of frozen values costs, against one step of the optimizer that is searched.

Half of a bf16 model is frozen, and the other half stepped as one flat fp32 master: at every `verify`, the
search has to go through all of it, and finds nothing. Timed is all of `verify(model, optimizer)`. Parameters
come in more and more pieces, so that what each of them costs shows as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import frozen_opt
from benchmarks.common import Result, command_line, log_to_nowhere, table

TARGET = 0.25
"""Of a step, for parameters of 2**16 elements or more."""
LARGE = 1 << 16


class Counting(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


def half(parameters: int, elements: int) -> nn.ParameterList:
    return nn.ParameterList(
        torch.randn(elements // parameters, dtype=torch.bfloat16) for _ in range(parameters)
    )


def flat_master(parameters: list[nn.Parameter]) -> nn.Parameter:
    return nn.Parameter(torch.cat([parameter.detach().float() for parameter in parameters]))


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Of this thread, so that a busy machine does not count; nothing here waits."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return median(times)


def measure(parameters: int, elements: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    frozen_opt.reset()
    model = nn.ModuleDict(
        {"frozen": half(parameters, elements), "rest": half(parameters, elements), "norm": nn.LayerNorm(64)}
    )
    report = frozen_opt.freeze_parameters(model, ["frozen.*"], role="policy")
    norm = list(model["norm"].parameters())
    dishonest = torch.optim.AdamW([flat_master([*model["frozen"], *model["rest"]]), *norm])
    try:
        report.verify(model, dishonest)
        caught = False
    except frozen_opt.FrozenParameterInOptimizerError:
        caught = True
    del dishonest
    master = flat_master(list(model["rest"]))
    own = torch.optim.AdamW(frozen_opt.trainable_parameters(model))
    for parameter in (master, *frozen_opt.trainable_parameters(model)):
        parameter.grad = torch.zeros_like(parameter)
    steps = {
        "a step": torch.optim.AdamW([master, *norm], lr=0.0),
        "a fused step": torch.optim.AdamW([master, *norm], lr=0.0, fused=True),
        "a step of the parameters one by one": own,
    }
    for optimizer in steps.values():
        optimizer.step()  # allocates its state
    masters = steps["a step"]
    with Counting() as counting:
        report.verify(model, own)
    return {
        "parameters": parameters,
        "elements": elements,
        "caught": caught,
        "operations_without_masters": counting.count,
        "seconds": {
            "verify": seconds(lambda: report.verify(model, masters), repeats),
            "verify without masters": seconds(lambda: report.verify(model, own), repeats),
            **{name: seconds(optimizer.step, repeats) for name, optimizer in steps.items()},
        },
    }


def run(full: bool) -> Result:
    """Small: half as many elements, in two sizes of parameters."""
    elements = 1 << (25 if full else 24)
    counts = (8, 64, 512, 4096) if full else (8, 64)
    with log_to_nowhere():
        measured = [measure(count, elements, 7 if full else 3) for count in track(counts, "copies")]
    claims = {
        "a master of what is frozen is caught": all(row["caught"] for row in measured),
        "without masters, verify runs no operation of torch": not any(
            row["operations_without_masters"] for row in measured
        ),
    }
    for row in measured:
        times, count = row["seconds"], row["parameters"]
        if elements // count >= LARGE:
            claim = (
                f"{count} frozen parameters of {elements // count:,} elements, cost: at most {TARGET} steps"
            )
            claims[claim] = times["verify"] <= TARGET * times["a step"]
        else:
            claim = f"{count} frozen parameters, cost: no more than a step of as many, one by one"
            claims[claim] = times["verify"] <= times["a step of the parameters one by one"]
    ways = list(measured[0]["seconds"])
    return Result(
        "copies",
        {"measured": measured},
        [
            table(
                f"Search of a flat master of {elements:,} elements for as many frozen ones",
                ["frozen parameters", *ways],
                [
                    (row["parameters"], *(f"{row['seconds'][way] * 1e3:.1f} ms" for way in ways))
                    for row in measured
                ],
            )
        ],
        plot(measured, ways),
        claims,
    )


def plot(rows: list[dict[str, Any]], ways: list[str]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in ways:
        axes.loglog(
            [row["parameters"] for row in rows],
            [row["seconds"][way] for row in rows],
            "o-",
            label=way,
            linewidth=3 if way == "verify" else 1.5,
        )
    axes.set_xlabel("frozen parameters (tensors), of the same elements together")
    axes.set_ylabel("CPU time (seconds)")
    axes.set_title("Searching a flat master for frozen values, against stepping it")
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(run)
