"""The demo's config: demo.yaml, and overrides that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from frozen_opt.commands.bad_input import BadInput, first_line
from frozen_opt.commands.yaml_input import check_interpolations, check_size, explain
from frozen_opt.demo.backends import STRATEGIES
from frozen_opt.demo.ppo import TASKS


def load_config(overrides: Sequence[str]) -> Any:
    """demo.yaml with the overrides: each key must be there already, each value be of the type it has there.

    Raises:
        BadInput: It isn't so.
    """
    default = OmegaConf.load(Path(__file__).with_name("demo.yaml"))
    OmegaConf.set_struct(default, True)  # refuses unknown keys
    for role in ("policy", "critic"):
        OmegaConf.set_struct(default.trainer[role].optimizer_config.optimizer_kwargs, False)
        OmegaConf.set_struct(default.trainer[role].freeze_schedule, False)
    for override in overrides:
        _merge(default, [override])  # each alone first, for a message that names it
    config = _merge(default, overrides)
    _check(OmegaConf.to_container(config, resolve=True), OmegaConf.to_container(default))
    for key, known in (("environment.env_class", TASKS), ("trainer.strategy", STRATEGIES)):
        if (name := OmegaConf.select(config, key)) not in known:
            raise BadInput(f"{key} is {name!r}, not one of {[*known]}")
    if config.trainer.strategy not in ("torch", "fsdp2") and any(map(schedule_of, roles(config).values())):
        raise BadInput(
            f"trainer.strategy={config.trainer.strategy} can't train what its first list froze: a "
            "freeze_schedule is for torch and fsdp2"
        )
    return config


def roles(config: Any) -> dict[str, Any]:
    """The settings of each role that there is."""
    return {role: config.trainer[role] for role in ("policy", "critic") if config.trainer[role] is not None}


def schedule_of(node: Any) -> dict[int, list[str]]:
    """Step -> the list from that step on."""
    schedule: Any = OmegaConf.to_container(node.freeze_schedule)
    return dict(schedule)


def _merge(default: Any, overrides: Sequence[str]) -> Any:
    text = " ".join(overrides)[:200]
    if not all("=" in override for override in overrides):
        raise BadInput(f"malformed override {text!r}: write key=value, as in trainer.steps=30")
    values = [override.partition("=")[2] for override in overrides]
    try:
        for value in values:
            check_size(value)
        config = OmegaConf.merge(default, OmegaConf.from_dotlist(list(overrides)))
        check_interpolations(OmegaConf.to_container(config))
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except ConfigKeyError as error:
        raise BadInput(f"unknown key in {text!r}: {first_line(error)}") from error
    except Exception as error:  # OmegaConf's, YAML's, ANTLR's
        raise BadInput(
            f"malformed override {text!r}: {explain(error, values[0])}\n"
            """Values are YAML, so quote patterns: 'trainer.policy.freeze_parameters=["*.mlp.gate.weight"]'"""
        ) from error
    return config


def _check(value: Any, default: Any, key: str = "") -> None:
    """That a value is of its default's type, and a number no less than it may be."""
    name = key.rpartition(".")[2]
    if name == "freeze_parameters" or (name == "critic" and value is None):
        return  # frozen_opt checks patterns
    if name == "freeze_schedule":
        steps = [*value] if isinstance(value, dict) else [0]
        if not all(type(step) is int and step > 1 for step in steps):
            raise BadInput(f"{key} is {value!r}, and must map steps from 2 on to lists, such as {{30: []}}")
        return
    kind: Any = int | float if isinstance(default, float) else type(default)
    if not isinstance(value, kind) or isinstance(value, bool):  # no key is a switch, and True is an int
        example = "" if isinstance(default, dict) else f", such as {default!r}"
        raise BadInput(f"{key} is {value!r}, and must be of type {type(default).__name__}{example}")
    lowest = 0 if name == "seed" or isinstance(default, float) else 1
    if isinstance(default, int | float) and not value >= lowest:
        raise BadInput(f"{key} is {value!r}, and must be {lowest} or more")
    if isinstance(default, dict):
        for child in default:
            _check(value[child], default[child], f"{key}.{child}".lstrip("."))
