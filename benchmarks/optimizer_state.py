"""What freezing saves in optimizer state: measured in the optimizers, not computed.

Every dense optimizer of torch.optim and torch-optimizer takes real steps on a small Qwen3-MoE: with nothing
frozen, with `with_freezing`, and on the ideal, a model out of which the frozen tensors were taken
altogether. Counted is each tensor that the optimizer reaches, other than the parameters. Then the same on
Qwen3-30B-A3B in full size, on tensors without memory.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch_optimizer
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.spawn import ProcessExitedException
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import frozen_opt
from benchmarks.common import Result, command_line, log_to_nowhere, size, table
from benchmarks.launch import run_ranks
from frozen_opt.optimizers_by_name import build_optimizer

Factory = Callable[[nn.Module, Any], torch.optim.Optimizer]

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
QWEN3_30B_A3B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
QWEN3_30B_A3B_ELEMENTS = 30_532_122_624
"""As its checkpoint says: a check that the tree is the real one."""

NO_THREE_DIMENSIONS = ("Adafactor (torch-optimizer)", "Adahessian (torch-optimizer)")
"""They fail on fused experts, [experts, rows, columns]; these are matrices to them."""

STEPS = 6  # Lookahead keeps its slow weights from the fifth on


def freezes(model: nn.Module) -> dict[str, list[str]]:
    last = model.config.num_hidden_layers - 1
    return {
        "routers": ["*.mlp.gate.weight"],
        "embeddings": ["model.embed_tokens.weight"],
        "all but the last layer": ["*", f"!model.layers.{last}.*"],
    }


def factories() -> dict[str, Factory]:
    """Every optimizer that takes dense gradients; with momentum, where that is optional."""
    found: dict[str, Factory] = {}
    for package in (torch.optim, torch_optimizer):
        for name, kind in sorted(vars(package).items()):
            if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
                continue
            if kind in (torch.optim.Optimizer, torch.optim.SparseAdam):
                continue
            label = f"{name} (torch-optimizer)" if package is torch_optimizer else name
            found[label] = partial(_build, kind)
    found["Muon"] = _muon
    found["Lookahead (torch-optimizer)"] = _lookahead
    return found


def _build(kind: Any, model: nn.Module, config: Any) -> torch.optim.Optimizer:
    momentum = inspect.signature(kind).parameters.get("momentum")
    options = {"momentum": 0.9} if momentum is not None and momentum.default == 0 else {}
    return kind(frozen_opt.trainable_parameters(model), **options)


def _muon(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """The Muon of torch takes matrices alone: the hybrid, with AdamW for the rest."""
    return build_optimizer(model, {"optimizer_config": {"optimizer": "Muon"}})


def _lookahead(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch_optimizer.Lookahead(torch.optim.AdamW(frozen_opt.trainable_parameters(model)))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that the optimizer reaches, but for the parameters and their gradients."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sizes: dict[int, int] = {}
    visited: set[int] = set()
    pending: list[Any] = [optimizer]
    while pending:
        item = pending.pop()
        if id(item) in visited or id(item) in parameters:
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            sizes[id(item)] = item.numel() * item.element_size()
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, torch.optim.Optimizer):
            pending += vars(item).values()
    return sum(sizes.values())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Steps on the sum of squares of all trainable elements; the bytes of state after them."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = torch.stack([(p * p).sum() for p in model.parameters() if p.requires_grad]).sum()
            loss.backward(create_graph=isinstance(optimizer, torch_optimizer.Adahessian))
        return loss.detach()

    for _ in range(STEPS):
        closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
    return state_bytes(optimizer)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step(*[lambda: torch.zeros(())] if isinstance(optimizer, torch.optim.LBFGS) else [])
    for parameter in model.parameters():
        parameter.grad = None
    return state_bytes(optimizer)


def without(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """A copy of the model that never had what the patterns match."""
    names = set(frozen_opt.plan_freezing(model, patterns, role="policy").names)
    ideal = copy.deepcopy(model)
    for name, _ in list(ideal.named_parameters()):
        if name in names:
            owner, _, attribute = name.rpartition(".")
            ideal.get_submodule(owner).register_parameter(attribute, None)
    return ideal


def with_flat_experts(model: nn.Module) -> nn.Module:
    flat = copy.deepcopy(model)
    for name, parameter in list(flat.named_parameters()):
        if parameter.ndim == 3:
            owner, _, attribute = name.rpartition(".")
            flat.get_submodule(owner).register_parameter(
                attribute, nn.Parameter(parameter.data.flatten(0, 1))
            )
    return flat


def on_small_model(factory: Factory, model: nn.Module) -> dict[str, Any]:
    row: dict[str, Any] = {"bytes": train(whole := copy.deepcopy(model), factory(whole, None)), "frozen": {}}
    row["bytes_per_element"] = row["bytes"] / sum(p.numel() for p in model.parameters())
    for what, patterns in freezes(model).items():
        frozen = copy.deepcopy(model)
        optimizer = frozen_opt.with_freezing("policy", patterns=patterns)(factory)(frozen, None)
        ideal = without(model, patterns)
        ours, best = train(frozen, optimizer), train(ideal, factory(ideal, None))
        row["frozen"][what] = {
            "bytes": ours,
            "ideal": best,
            "saved": 1 - ours / row["bytes"],
            "ratio": ours / best,
        }
    return row


def on_large_model(name: str) -> dict[str, Any]:
    """Bytes by what is frozen, and elements; or `refused`. Runs in a process of its own: some crash it."""
    warnings.filterwarnings("ignore")
    factory = factories()[name]
    with FakeTensorMode(), log_to_nowhere():
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_30B_A3B))
        elements = sum(p.numel() for p in model.parameters())
        sizes: dict[str, int] = {}
        try:
            sizes["nothing"] = one_step(model, factory(model, None))
            for what, patterns in freezes(model).items():
                model.requires_grad_(True)
                optimizer = frozen_opt.with_freezing("policy", patterns=patterns)(factory)(model, None)
                sizes[what] = one_step(model, optimizer)
        except Exception as error:  # whatever an optimizer raises that reads values
            return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"}
    return {"elements": elements, "sizes": sizes}


def in_own_process(name: str) -> dict[str, Any]:
    try:
        return run_ranks(on_large_model, 1, name)[0]
    except ProcessExitedException as error:
        return {"refused": str(error)}


def run(full: bool) -> Result:
    """Small: on the large model, AdamW alone."""
    warnings.filterwarnings("ignore")  # old optimizers call functions that are deprecated
    torch.set_num_threads(1)  # the tensors are small, and threads that wait for a busy core slow all down
    torch.manual_seed(0)
    small = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL))
    every = factories()
    chosen = list(every) if full else ["AdamW"]
    rows: dict[str, Any] = {}
    large: dict[str, Any] = {}
    refused: dict[str, str] = {}
    elements: set[int] = set()
    with Progress() as progress, log_to_nowhere():
        task = progress.add_task("optimizer state", total=len(every) + len(chosen))
        for name, factory in every.items():
            model = with_flat_experts(small) if name in NO_THREE_DIMENSIONS else small
            rows[name] = on_small_model(factory, model)
            progress.advance(task)
        for name in chosen:
            told = in_own_process(name)
            if "refused" in told:
                refused[name] = told["refused"]
            else:
                large[name] = told["sizes"]
                elements.add(told["elements"])
            progress.advance(task)
    return Result(
        "optimizer_state",
        {"small_model": rows, "Qwen3-30B-A3B": large, "no_fake_tensors": refused},
        tables(rows, large, refused),
        plot(large),
        {
            f"state with freezing is that of the trainable tensors alone, for {len(rows)} optimizers": all(
                each["ratio"] == 1 for row in rows.values() for each in row["frozen"].values()
            ),
            "freezing all but the last layer saves state in each of them": all(
                row["frozen"]["all but the last layer"]["saved"] > 0 for row in rows.values()
            ),
            "the large model has as many elements as Qwen3-30B-A3B's checkpoint": elements
            == {QWEN3_30B_A3B_ELEMENTS},
            "most optimizers were measured on the large model": len(large) > len(refused),
        },
    )


def tables(rows: Mapping[str, Any], large: Mapping[str, Any], refused: Mapping[str, str]) -> list[Any]:
    whats = list(next(iter(rows.values()))["frozen"])
    return [
        table(
            "Optimizer state on a small Qwen3-MoE; saved by freezing",
            ["optimizer", "nothing frozen", "bytes an element", *whats, "to ideal"],
            [
                (
                    name,
                    size(row["bytes"]),
                    f"{row['bytes_per_element']:.2f}",
                    *(f"{row['frozen'][what]['saved']:.1%}" for what in whats),
                    " ".join(dict.fromkeys(f"{each['ratio']:.6g}" for each in row["frozen"].values())),
                )
                for name, row in rows.items()
            ],
        ),
        table(
            "Optimizer state of Qwen3-30B-A3B in float32, by what is frozen",
            ["optimizer", "nothing", *whats],
            [(name, *map(size, sizes.values())) for name, sizes in large.items()],
        ),
        *(
            [table("Refuse tensors without memory", ["optimizer", "why"], list(refused.items()))]
            if refused
            else []
        ),
    ]


def plot(large: Mapping[str, Mapping[str, int]]) -> Figure:
    """The heaviest, one of each size: many optimizers keep the same."""
    seen: dict[tuple[int, ...], list[str]] = {}
    for name, sizes in large.items():
        seen.setdefault(tuple(round(each / 2**30) for each in sizes.values()), []).append(name)
    shown = sorted(((names, key) for key, names in seen.items() if any(key)), key=lambda pair: -pair[1][0])
    whats = list(next(iter(large.values())))
    figure = Figure(figsize=(8, 0.9 + 0.75 * len(shown)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(whats)
    for place, what in enumerate(whats):
        bars = axes.barh(
            [row + (place - 1.5) * height for row in range(len(shown))],
            [key[place] for _, key in shown],
            height,
            label=what,
        )
        axes.bar_label(bars, fontsize=8, padding=2)
    axes.set_yticks(range(len(shown)), [_short(names) for names, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("optimizer state (GiB, float32)")
    axes.set_title("What is frozen keeps no optimizer state: Qwen3-30B-A3B")
    axes.legend(title="frozen", loc="lower right")
    return figure


def _short(names: Sequence[str]) -> str:
    plain_names = [name.removesuffix(" (torch-optimizer)") for name in names]
    preferred = sorted(plain_names, key=lambda name: name not in ("AdamW", "SGD", "Muon"))
    return preferred[0] + (f"\nand {len(names) - 1} more" if len(names) > 1 else "")


if __name__ == "__main__":
    command_line(run)
