"""What the agreement across ranks costs: time, and bytes that each rank writes to and reads from the store.

Timed is a whole call of a decorated factory, against the same call where no rank is asked, and against the
three small collectives (an all-reduce, an all-gather and an all-reduce of 24 bytes) that would tell as much.
Counted is what passes through the process group's store, by a stand-in that hands each operation on.
FSDP-like ranks all hold the same names; pipeline-like ones each hold layers of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.progress import track
from torch import nn

import frozen_opt
from benchmarks.common import Result, command_line, log_to_nowhere, table
from benchmarks.launch import run_ranks
from frozen_opt.ranks import agreement

LAYERS, EXPERTS = 64, 4
PATTERNS = ["*.mlp.gate.weight", "*.self_attn.*"]
LAYOUTS = {"FSDP": "FSDP-like (all hold the same)", "pipeline": "pipeline-like (each holds its own)"}


class Chunk(nn.Module):
    """The layers of one stage, under their global numbers."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): _layer() for layer in layers})


def _layer() -> nn.Module:
    def leaf() -> nn.Module:
        return nn.Linear(1, 1, bias=False, device="meta")

    return nn.ModuleDict(
        {
            "self_attn": nn.ModuleDict({name: leaf() for name in ("q_proj", "k_proj", "v_proj", "o_proj")}),
            "mlp": nn.ModuleDict({"gate": leaf(), "experts": nn.ModuleList(leaf() for _ in range(EXPERTS))}),
        }
    )


class Counting:
    """A store that notes what this rank writes and reads; `check` is asked until an answer is there."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.written = self.read = self.operations = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.store, name)
        if name == "timeout":
            return operation

        def counted(*arguments: Any) -> Any:
            result = operation(*arguments)
            self.operations += name != "check"
            self.written += sum(len(each) for each in arguments[1:] if isinstance(each, str))
            self.read += len(result) if isinstance(result, bytes) else 0
            return result

        return counted


def on_rank(layout: str, repeats: int) -> dict[str, Any]:
    """One rank's part: call a decorated factory, and tell seconds, bytes and how many names came out."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = range(LAYERS) if layout == "FSDP" else range(rank * LAYERS // ranks, (rank + 1) * LAYERS // ranks)
    model = Chunk(mine)
    optimizer = torch.optim.SGD(
        [parameter for name, parameter in model.named_parameters() if "experts" in name]
    )
    alone = [dist.new_group([each]) for each in range(ranks)][rank]

    def call(group: dist.ProcessGroup | None) -> None:
        frozen_opt.with_freezing("policy", patterns=PATTERNS, group=group)(lambda model: optimizer)(model)

    def collectives() -> None:
        row = torch.zeros(3, dtype=torch.int64)
        dist.all_reduce(row)
        dist.all_gather([torch.empty_like(row) for _ in range(ranks)], row)
        dist.all_reduce(row)

    with log_to_nowhere():
        seconds = {
            name: seconds_of(work, repeats)
            for name, work in {
                "call": lambda: call(None),
                "alone": lambda: call(alone),
                "collectives": collectives,
            }.items()
        }
        counting: list[Counting] = []
        own_store = agreement._store
        agreement._store = lambda group: counting.append(Counting(own_store(group))) or counting[-1]
        call(None)
        agreement._store = own_store
        names = frozen_opt.report("policy").parameter_count
    store = counting[0] if counting else Counting(None)
    counted = {"written": store.written, "read": store.read, "operations": store.operations}
    return {"seconds": seconds, "names": names, **counted}


def seconds_of(work: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def run(full: bool) -> Result:
    """Small: up to 4 ranks."""
    counts = (1, 2, 4, 8, 16, 32) if full else (1, 2, 4)
    measured = [
        _together(layout, ranks, run_ranks(on_rank, ranks, layout, 20 if full else 5))
        for layout, ranks in track([(layout, ranks) for layout in LAYOUTS for ranks in counts], "ranks")
    ]
    several = [row for row in measured if row["ranks"] > 1]
    fsdp = [row["written"][0] for row in several if row["layout"] == "FSDP"]
    pipeline = [
        row["written_by_all"] - row["ranks"] * min(fsdp) for row in several if row["layout"] != "FSDP"
    ]
    return Result(
        "ranks",
        {"measured": measured},
        [
            table(
                "Agreement across ranks: what passes through the store, and how long a call takes",
                [
                    *("layout", "ranks", "names", "a rank writes (bytes)", "and reads", "operations"),
                    *("call", "without ranks", "3 collectives"),
                ],
                [
                    (
                        LAYOUTS[row["layout"]],
                        row["ranks"],
                        *row["names"],
                        _span(row["written"]),
                        _span(row["read"]),
                        _span(row["operations"]),
                        *(
                            f"{row['seconds'][name] * 1e3:.1f} ms"
                            for name in ("call", "alone", "collectives")
                        ),
                    )
                    for row in measured
                ],
            ),
        ],
        plot(measured),
        {
            "every rank ends with the names of the whole model": all(
                row["names"] == [LAYERS * 5] for row in measured
            ),
            "one process alone asks nobody": all(
                row["operations"] == [0, 0] for row in measured if row["ranks"] == 1
            ),
            "identical sets: a rank writes less than 1,000 bytes, so no names travel": max(fsdp) < 1000,
            "distinct sets: each travels once, so what all write together grows by less than 5 %": max(
                pipeline
            )
            < 1.05 * min(pipeline),
        },
    )


def _together(layout: str, ranks: int, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for what all ranks told: the slowest one's seconds, the least and the most of all else."""
    row: dict[str, Any] = {"layout": layout, "ranks": ranks}
    row["seconds"] = {
        name: max(each["seconds"][name] for each in told) for name in ("call", "alone", "collectives")
    }
    for name in ("written", "read", "operations"):
        values = [each[name] for each in told]
        row[name] = [min(values), max(values)]
    row["written_by_all"] = sum(each["written"] for each in told)
    return row | {"names": sorted({each["names"] for each in told})}


def _span(values: Sequence[int]) -> str:
    least, most = values
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def plot(measured: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    labels = {
        "call": "a decorated call",
        "alone": "the same, no rank asked",
        "collectives": "3 small collectives",
    }
    rows = [row for row in measured if row["layout"] == "FSDP"]
    for (name, label), style in zip(labels.items(), ("o-", "s--", "^:"), strict=True):
        seconds = [row["seconds"][name] * 1e3 for row in rows]
        axes.loglog([row["ranks"] for row in rows], seconds, style, base=10, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["ranks"] for row in rows], [str(row["ranks"]) for row in rows])
    axes.set_xlabel("ranks, on this machine's few cores")
    axes.set_ylabel("ms, the slowest rank's median")
    axes.set_title("What it costs that all ranks agree")
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    command_line(run)
