"""What every trainer's test trains, and what it must find afterwards.

The model and the patterns are those of `tests.ranks.qwen`; here they also lie in a folder, with a tokenizer,
since trainers load by path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from frozen_opt import metrics, named_parameters, report
from tests.ranks import qwen

PATTERNS = qwen.PATTERNS
TYPO = ["model.layers.*.mlp.gates.weight"]
"""Matches nothing; the real name is a letter away."""
WORDS = 64


def frozen_names() -> list[str]:
    """The names that PATTERNS select, by a loop of their own, in model order."""
    names = []
    for name, _ in qwen.build().named_parameters():
        verdicts = [not p.startswith("!") for p in PATTERNS if fnmatchcase(name, p.removeprefix("!"))]
        if verdicts and verdicts[-1]:
            names.append(name)
    return names


def tokenizer() -> Any:
    """A tokenizer of one word a token: w0, w1 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1", pad_token="w2", unk_token="w0")


def save(folder: Path) -> str:
    """Write the model and its tokenizer into a folder, and return its path."""
    qwen.build().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def rows(count: int = 32) -> list[dict[str, list[int]]]:
    """Rows of 16 tokens with labels."""
    data = torch.randint(3, WORDS, (count, 16), generator=torch.Generator().manual_seed(2)).tolist()
    return [{"input_ids": row, "labels": row} for row in data]


@dataclass
class Outcome:
    """What a rank found after it trained. Names are canonical."""

    names: tuple[str, ...]
    """What the report says is frozen."""
    elements: int
    metrics: dict[str, int]
    changed: list[str]
    """Parameters that are no longer bit-identical, gathered in full."""
    with_state: list[str]
    """Parameters for which the optimizer keeps state."""
    trainable: list[str]


def outcome(
    model: Any, optimizer: Any, start: Mapping[str, torch.Tensor] | None = None, role: str = "policy"
) -> Outcome:
    """Collect an `Outcome`. All ranks must call.

    Args:
        model: The model as the trainer has it now.
        optimizer: A torch optimizer over the model's own parameters, or several.
        start: The weights to compare with; by default those of `qwen.build()`.
        role: Whose report to take.
    """
    start = start or dict(qwen.build().named_parameters())
    states = [each.state for each in (optimizer if isinstance(optimizer, list) else [optimizer])]
    with qwen.in_full(model) as now:
        changed = [name for name, value in now.items() if not torch.equal(value.cpu(), start[name].cpu())]
    parameters = dict(named_parameters(model))
    return Outcome(
        report(role).names,
        report(role).element_count,
        metrics(),
        changed,
        [name for name, parameter in parameters.items() if any(state.get(parameter) for state in states)],
        [name for name, parameter in parameters.items() if parameter.requires_grad],
    )


def check(found: Outcome, start: Mapping[str, torch.Tensor] | None = None, role: str = "policy") -> None:
    """Assert that exactly the frozen parameters were left alone, and all others trained.

    Args:
        found: Of one rank, after some steps with weight decay.
        start: The weights that it began with; by default those of `qwen.build()`.
        role: Under which the metrics stand.
    """
    sizes = {name: value.numel() for name, value in (start or dict(qwen.build().named_parameters())).items()}
    names = frozen_names()
    others = sorted(name for name in sizes if name not in names)
    elements = sum(sizes[name] for name in names)
    assert list(found.names) == names
    assert found.elements == elements
    assert found.metrics[f"{role}/frozen_parameter_count"] == len(names)
    assert found.metrics[f"{role}/frozen_element_count"] == elements
    assert sorted(found.changed) == others
    assert sorted(found.with_state) == others
    assert sorted(found.trainable) == others
