"""What the agreement across ranks costs: time, and bytes that each rank hands to collectives.

Counted is the payload: the bytes of the tensors that a rank gives to each collective that `plan_freezing`
runs, seen by a dispatch mode, so that none is missed. What travels on the wire depends on the algorithm.
FSDP-like ranks all hold the same names; pipeline-like ones each hold layers of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch.distributed as dist
from matplotlib.figure import Figure
from rich.progress import track
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import frozen_opt
from benchmarks.common import Result, command_line, log_to_nowhere, size, table
from benchmarks.launch import run_ranks

LAYERS, EXPERTS = 64, 4
PATTERNS = ["*.mlp.gate.weight", "*.self_attn.*"]
LAYOUTS = {"FSDP": "FSDP-like (all hold the same)", "pipeline": "pipeline-like (each holds its own)"}
PROJECTED_RANKS = 4096
SENT = {"allreduce_": 0, "allgather_": 1, "broadcast_": 0}
"""torch's c10d operator -> which argument holds what this rank sends; others are a KeyError."""


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


class Counting(TorchDispatchMode):
    """Notes the payload of each collective of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            tensors = args[SENT[function._schema.name.removeprefix("c10d::")]]
            self.sent.append(sum(tensor.nbytes for tensor in tensors))
        return function(*args, **kwargs or {})


def on_rank(layout: str, repeats: int) -> dict[str, Any]:
    """One rank's part: plan, and tell seconds, bytes and how many names came out."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = range(LAYERS) if layout == "FSDP" else range(rank * LAYERS // ranks, (rank + 1) * LAYERS // ranks)
    model = Chunk(mine)
    seconds = []
    with log_to_nowhere():
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            frozen_opt.plan_freezing(model, PATTERNS, role="policy")
            seconds.append(time.perf_counter() - start)
        with Counting() as counting:
            plan = frozen_opt.plan_freezing(model, PATTERNS, role="policy")
    return {"seconds": median(seconds), "sent": counting.sent, "names": len(plan.names)}


def run(full: bool) -> Result:
    """Small: up to 4 ranks."""
    counts = (1, 2, 4, 8, 16) if full else (1, 2, 4)
    measured = []
    for layout, ranks in track([(layout, ranks) for layout in LAYOUTS for ranks in counts], "ranks"):
        told = run_ranks(on_rank, ranks, layout, 20 if full else 5)
        measured.append(
            {
                "layout": layout,
                "ranks": ranks,
                "seconds": max(each["seconds"] for each in told),
                "sent_by_rank_0": told[0]["sent"],
                "sent_by_another": told[-1]["sent"],
                "all_send_the_same": all(each["sent"] == told[0]["sent"] for each in told),
                "names": sorted({each["names"] for each in told}),
            }
        )
    several = [row for row in measured if row["ranks"] > 1]
    fsdp = [row["sent_by_rank_0"] for row in several if row["layout"] == "FSDP"]
    pipeline = [sum(row["sent_by_rank_0"]) for row in several if row["layout"] == "pipeline"]
    projected = project(several)
    return Result(
        "ranks",
        {"measured": measured, "projected": projected},
        [
            table(
                "Agreement across ranks: payload that a rank sends, collective by collective",
                ["layout", "ranks", "names", "rank 0 sends (bytes)", "another sends (bytes)", "time"],
                [
                    (
                        LAYOUTS[row["layout"]],
                        row["ranks"],
                        *row["names"],
                        _sum(row["sent_by_rank_0"]),
                        _sum(row["sent_by_another"]) if row["ranks"] > 1 else "-",
                        f"{row['seconds'] * 1e3:.1f} ms",
                    )
                    for row in measured
                ],
            ),
            table(
                f"Projected to {PROJECTED_RANKS:,} ranks, by a ring (assumptions in benchmarks/ranks.py)",
                ["layout", "a rank sends", "and receives"],
                [
                    (LAYOUTS[layout], size(each["sent"]), size(each["received"]))
                    for layout, each in projected.items()
                ],
            ),
        ],
        plot(measured),
        {
            "every rank ends with the names of the whole model": all(
                row["names"] == [LAYERS * 5] for row in measured
            ),
            "rank 0 sends no more than any other rank": all(row["all_send_the_same"] for row in measured),
            "one process alone sends nothing": all(
                not row["sent_by_rank_0"] for row in measured if row["ranks"] == 1
            ),
            "identical sets: what a rank sends does not grow with the ranks": all(
                sent == fsdp[0] for sent in fsdp
            ),
            "distinct sets: each travels once, so payload grows by less than 5 %": max(pipeline)
            < 1.05 * min(pipeline),
            "identical sets: less than 100 bytes, so no names travel": sum(fsdp[0]) < 100,
        },
    )


def _sum(sent: Sequence[int]) -> str:
    return f"{sum(sent):,} = {' + '.join(map(str, sent))}" if sent else "0"


def project(measured: Sequence[dict]) -> dict[str, dict[str, int]]:
    """Bytes of a rank among `PROJECTED_RANKS`, by what was counted with most ranks here.

    Assumes that the distinct sets of names are as many as were counted (pipeline stages, say), each held by
    as many replicas as it takes, so that payloads stay what they are; and ring algorithms: an all-reduce
    sends and receives 2 (n - 1) / n of its payload, an all-gather n - 1 payloads. The first collective is
    an all-reduce, the second an all-gather, the third, where sets differ, an all-reduce.
    """
    projected = {}
    for layout in LAYOUTS:
        row = max((row for row in measured if row["layout"] == layout), key=lambda row: row["ranks"])
        reduced, gathered, *differing = row["sent_by_rank_0"]
        n = PROJECTED_RANKS
        wire = round(2 * (n - 1) / n * (reduced + sum(differing))) + (n - 1) * gathered
        projected[layout] = {
            "distinct_sets": row["ranks"] if differing else 1,
            "sent": wire,
            "received": wire,
        }
    return projected


def plot(measured: Sequence[dict]) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for layout, style in zip(LAYOUTS, ("o-", "s--"), strict=True):
        rows = [row for row in measured if row["layout"] == layout and row["ranks"] > 1]
        axes.loglog(
            [row["ranks"] for row in rows],
            [sum(row["sent_by_rank_0"]) for row in rows],
            style,
            base=10,
            label=LAYOUTS[layout],
        )
        axes.set_xscale("log", base=2)
    axes.set_xticks([row["ranks"] for row in rows], [str(row["ranks"]) for row in rows])
    axes.set_ylim(bottom=10)
    axes.set_xlabel("ranks")
    axes.set_ylabel("payload that each rank sends (bytes)")
    axes.set_title("What a rank sends to agree does not grow with the number of ranks")
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    command_line(run)
