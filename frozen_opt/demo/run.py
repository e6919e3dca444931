"""The run: train both roles as the config says, log each step, and compare the weights in the end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import frozen_opt
from frozen_opt.commands.bad_input import BadInput
from frozen_opt.demo.backends import launched, rank_and_size
from frozen_opt.demo.config import load_config, roles, schedule_of
from frozen_opt.demo.learners import change_list, make_learners, moved
from frozen_opt.demo.ppo import ppo_step
from frozen_opt.demo.show import progress, summary


def run(overrides: Sequence[str], out: Path) -> bool:
    """Train as the config says, and show it; True if no frozen tensor moved.

    Raises:
        BadInput: An override is malformed, unknown, of the wrong type, or gives no model or optimizer.
        FreezingError: The freeze is refused.
        OSError: `out` can't be written.
    """
    config = load_config(overrides)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower shared out
    try:
        with launched(config):
            return train(config, out)
    finally:
        torch.set_num_threads(threads)


def train(config: Any, out: Path) -> bool:
    """Build both roles, train them, and compare their weights with what they were.

    Every rank does the same, since much of it is done together; the first alone is heard.
    """
    learners = make_learners(config)
    rank, _ = rank_and_size()
    console = Console(quiet=rank > 0)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    with (
        Path(os.devnull if rank else out / "metrics.jsonl").open("w", encoding="utf-8") as file,
        progress(config.trainer.steps, console) as show,
    ):
        for step in range(1, config.trainer.steps + 1):
            for role, node in roles(config).items():
                if (patterns := schedule_of(node).get(step)) is not None:
                    change_list(learners[role], patterns, node)
            try:
                metrics = {"step": step, **ppo_step(**learners, config=config), **frozen_opt.metrics()}
            except FloatingPointError as error:
                raise BadInput(f"training diverged in step {step}: lower the learning rates") from error
            print(json.dumps(metrics), file=file, flush=True)
            show(metrics)
    for learner in learners.values():
        console.print(summary(learner))
    console.print(f"metrics of each step: {file.name}", markup=False, highlight=False, soft_wrap=True)
    return not any(learner.astray + moved(learner, frozen=True) for learner in learners.values())
