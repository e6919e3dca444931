"""What freezing saves in a training step: time, peak memory, gradients and optimizer state.

A Qwen3-MoE is trained with AdamW: plainly, with FSDP2 on 2 ranks, and with ZeRO-2 on 2 ranks; with nothing
frozen, the routers, and about 50 % and 90 % of the parameters from the embedding upwards. Beside it the
usual mistake: the optimizer gets all parameters, and 90 % are frozen afterwards. Each is measured in
processes of its own, in turns, and compared with "nothing frozen" of the same turn. All numbers are those of
rank 0. CPU time leaves out what a rank waits, for others or on a busy machine.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import frozen_opt
from benchmarks.common import Result, command_line, log_to_nowhere, size, table
from benchmarks.launch import run_ranks

BACKENDS = {"plain": 1, "FSDP2": 2, "ZeRO-2": 2}
"""Backend -> how many ranks."""
FROZEN = {"nothing": 0.0, "routers": None, "50 %": 0.5, "90 %": 0.9, "90 %, too late": 0.9}
"""What is frozen -> which share of the elements."""
SMALL = {"layers": 10, "hidden": 128, "steps": 4, "rounds": 1}
FULL = {"layers": 10, "hidden": 256, "steps": 5, "rounds": 3}


def build_model(sizes: Mapping[str, int]) -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=2048,
            hidden_size=sizes["hidden"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=2 * sizes["hidden"],
        )
    )


def patterns(model: nn.Module, frozen: str) -> list[str]:
    """From the embedding upwards, layer by layer, as close to the share as that gets."""
    if frozen == "nothing":
        return []
    if frozen == "routers":
        return ["*.mlp.gate.weight"]
    wanted = FROZEN[frozen] * sum(p.numel() for p in model.parameters())
    candidates = ["model.embed_tokens.weight"]
    candidates += [f"model.layers.{layer}.*" for layer in range(model.config.num_hidden_layers)]
    missed = [
        abs(wanted - frozen_opt.plan_freezing(model, candidates[:count], role="try").element_count)
        for count in range(1, len(candidates) + 1)
    ]
    return candidates[: missed.index(min(missed)) + 1]


def prepare(backend: str, model: nn.Module, globs: Sequence[str], too_late: bool) -> tuple[Any, Any]:
    """The model and the optimizer, as the backend wants them; frozen in time, or too late."""

    def adamw(model: nn.Module, trained: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained(model), lr=1e-4, weight_decay=0.1)

    def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
        if too_late:
            return adamw(model, nn.Module.parameters)
        return frozen_opt.with_freezing("policy", patterns=globs)(adamw)(
            model, frozen_opt.trainable_parameters
        )

    if backend == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    names = names_of(model, globs) if too_late else set()
    late = [parameter for name, parameter in model.named_parameters() if name in names]
    optimizer = optimizer_for(model)
    if backend == "ZeRO-2":
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for parameter in late:
        parameter.requires_grad_(False)
    return model, optimizer


def names_of(model: nn.Module, globs: Sequence[str]) -> set[str]:
    return set(frozen_opt.plan_freezing(model, globs, role="try").names)


def on_rank(backend: str, frozen: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Train a few steps in this process, and tell what they took."""
    with log_to_nowhere():
        bare = build_model(sizes)
        globs, too_late = patterns(bare, frozen), frozen.endswith("too late")
        names = names_of(bare, globs) if globs else set()
        elements = sum(p.numel() for p in bare.parameters())
        share = sum(p.numel() for n, p in bare.named_parameters() if n in names) / elements
        model, optimizer = prepare(backend, bare, globs, too_late)
        before = checksums(model, names)
        tokens = torch.randint(2048, (1, 256))
        seconds, cpu_seconds = [], []
        for step in range(1 + sizes["steps"]):
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = model(input_ids=tokens, labels=tokens).loss
            model.backward(loss) if backend == "ZeRO-2" else loss.backward()
            gradients = sum(map(local_bytes, all_gradients(model, optimizer)))
            optimizer_step(backend, model, optimizer)
            if step:  # the first one builds the state
                seconds.append(time.perf_counter() - start)
                cpu_seconds.append(time.process_time() - cpu_start)
        verified = None
        if globs and not too_late:
            report = frozen_opt.report("policy")
            report.verify(model, optimizer)  # the first call remembers the tensors
            start = time.perf_counter()
            for _ in range(5):
                report.verify(model, optimizer)
            verified = (time.perf_counter() - start) / 5
        return {
            "share": share,
            "seconds": median(seconds),
            "cpu_seconds": median(cpu_seconds),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "gradient_bytes": gradients,
            "state_bytes": sum(map(local_bytes, all_state(optimizer))),
            "moved": checksums(model, names) != before,
            "verify_seconds": verified,
        }


def optimizer_step(backend: str, model: Any, optimizer: Any) -> None:
    if backend == "ZeRO-2":
        model.step()
    else:
        optimizer.step()
        optimizer.zero_grad()


def checksums(model: nn.Module, names: set[str]) -> dict[str, int]:
    """Of the bits of each frozen tensor that this rank holds."""
    return {
        name: int(local(parameter.detach()).view(torch.int32).sum())
        for name, parameter in frozen_opt.named_parameters(model)
        if name in names
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_bytes(tensor: torch.Tensor) -> int:
    return local(tensor).nbytes


def all_gradients(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    for averaged in getattr(optimizer, "averaged_gradients", {}).values():  # ZeRO keeps them apart
        yield from (gradient for gradient in averaged or () if gradient is not None)


def all_state(optimizer: Any) -> Iterator[torch.Tensor]:
    yield from getattr(optimizer, "single_partition_of_fp32_groups", ())  # ZeRO's copies of the weights
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def run(full: bool) -> Result:
    """Small: a smaller model, and one turn."""
    sizes = FULL if full else SMALL
    turns: dict[tuple[str, str], list[dict[str, Any]]] = {}
    work = [(b, f) for _ in range(sizes["rounds"]) for b in BACKENDS for f in FROZEN]
    for backend, frozen in track(work, "training step"):
        told = run_ranks(on_rank, BACKENDS[backend], backend, frozen, sizes)
        turns.setdefault((backend, frozen), []).append(told[0])
    measured = [summary(backend, frozen, turns) for backend in BACKENDS for frozen in FROZEN]
    by_case = {(row["backend"], row["frozen"]): row for row in measured}
    in_time = [row for row in measured if row["frozen"] != "90 %, too late"]
    verified = [row["verify_ratio"] for row in in_time if row["verify_ratio"] is not None]
    claims = {
        "what was frozen in time did not move by a bit": not any(row["moved"] for row in in_time),
        "FreezeReport.verify takes less than 5 % of a step (median of all)": median(verified) < 0.05,
    }
    for backend in BACKENDS:
        nothing, most = by_case[backend, "nothing"], by_case[backend, "90 %"]
        for what in ("gradient_bytes", "state_bytes"):
            trained = 1 - most["share"]
            claims[f"{backend}: with {most['share']:.0%} frozen, {what} are those of the rest"] = (
                abs(most[what] / nothing[what] - trained) < 0.01
            )
        claims[f"{backend}: with {most['share']:.0%} frozen, a step is faster"] = most["seconds_ratio"] < 1
    return Result(
        "training_step",
        {"measured": measured, "sizes": sizes},
        [
            table(
                "A training step, by what is frozen (AdamW, rank 0 of 1 or 2)",
                [
                    "backend, frozen",
                    "share",
                    "time",
                    "CPU time",
                    "peak memory",
                    "gradients",
                    "state",
                    "moved",
                    "verify / step",
                ],
                [
                    (
                        f"{row['backend']}, {row['frozen']}",
                        f"{row['share']:.1%}",
                        f"{row['seconds_ratio']:.2f}×",
                        f"{row['cpu_seconds_ratio']:.2f}×",
                        size(row["peak_bytes"]),
                        size(row["gradient_bytes"]),
                        size(row["state_bytes"]),
                        "yes" if row["moved"] else "no",
                        "-" if row["verify_ratio"] is None else f"{row['verify_ratio']:.2%}",
                    )
                    for row in measured
                ],
            )
        ],
        plot(by_case),
        claims,
    )


def summary(
    backend: str, frozen: str, turns: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    rows, yardstick = turns[backend, frozen], turns[backend, "nothing"]
    verify = [row["verify_seconds"] / row["seconds"] for row in rows if row["verify_seconds"] is not None]
    return {
        "backend": backend,
        "frozen": frozen,
        "share": rows[0]["share"],
        "seconds": median(row["seconds"] for row in rows),
        **{
            f"{what}_ratio": median(
                row[what] / other[what] for row, other in zip(rows, yardstick, strict=True)
            )
            for what in ("seconds", "cpu_seconds")
        },
        "peak_bytes": median(row["peak_bytes"] for row in rows),
        "gradient_bytes": rows[0]["gradient_bytes"],
        "state_bytes": rows[0]["state_bytes"],
        "moved": any(row["moved"] for row in rows),
        "verify_ratio": median(verify) if verify else None,
    }


def plot(by_case: Mapping[tuple[str, str], Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    panels: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "CPU time of a step (nothing frozen = 1)": lambda row: row["cpu_seconds_ratio"],
        "gradients (MiB a rank)": lambda row: row["gradient_bytes"] / 2**20,
        "optimizer state (MiB a rank)": lambda row: row["state_bytes"] / 2**20,
    }
    cases = [frozen for frozen in FROZEN if frozen != "90 %, too late"]
    all_axes = figure.subplots(1, len(panels))
    for axes, (label, value) in zip(all_axes, panels.items(), strict=True):
        for place, backend in enumerate(BACKENDS):
            axes.bar(
                [at + (place - 1) * 0.27 for at in range(len(cases))],
                [value(by_case[backend, frozen]) for frozen in cases],
                0.27,
                label=backend,
            )
        axes.set_xticks(range(len(cases)), cases, fontsize=8)
        axes.set_xlabel("frozen")
        axes.set_ylabel(label)
    all_axes[-1].legend()
    figure.suptitle("What is frozen costs no gradient, no optimizer state, and less time")
    return figure


if __name__ == "__main__":
    command_line(run)
