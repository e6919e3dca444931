"""A model to look at: from a config, from the names in a checkpoint, or from the user's own function.

Built on the meta device, so that it takes no memory. Nothing is downloaded, and no code runs that the user
has not named.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frozen_opt.headers import BadInput, Shapes, read_header, read_index, read_json
from frozen_opt.order import in_model_order


def call_factory(factory: str) -> tuple[nn.Module, bool]:
    """The model of a factory, and that all of its shapes are known."""
    module, _, function = factory.partition(":")
    if not module or not function:
        raise BadInput(f"--factory is {factory!r}, and must be module:function")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as python -m has it
    try:
        with redirect_stdout(sys.stderr), torch.device("meta"):
            model = getattr(importlib.import_module(module), function)()
    except Exception as error:  # whatever the user's code raises
        raise BadInput(f"--factory {factory} failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise BadInput(f"--factory {factory} returned a {type(model).__name__}, not a torch.nn.Module")
    return model, True


def open_model(source: str, trust_remote_code: bool) -> tuple[nn.Module, bool]:
    """The model that a path stands for, and whether all of its shapes are known."""
    path = Path(source)
    if path.is_dir():
        path = _within(path)
    if not path.exists():
        raise BadInput(
            f"{source} does not exist. Nothing is downloaded: give the path of a config.json, or of a "
            "model.safetensors.index.json"
        )
    if path.suffix != ".json":
        return _tree(read_header(path), path)
    settings = read_json(path)
    return (
        _tree(read_index(path), path)
        if "weight_map" in settings
        else (
            _transformers_model(path, settings, trust_remote_code),
            True,
        )
    )


def _within(folder: Path) -> Path:
    for name in ("config.json", "model.safetensors.index.json", "model.safetensors"):
        if (folder / name).exists():
            return folder / name
    raise BadInput(f"{folder} has neither config.json nor model.safetensors.index.json nor model.safetensors")


def _transformers_model(path: Path, settings: Mapping[str, Any], trust_remote_code: bool) -> nn.Module:
    for key, value in settings.items():
        if "layer" in key and isinstance(value, int) and value > 10_000:
            raise BadInput(f"{path} has {key} = {value}, for which no model is built")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise BadInput(
            f"a model from its config needs {error.name}: pip install 'frozen_opt[demo]'"
        ) from error
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(
            path.parent if path.name == "config.json" else path,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
        named = getattr(transformers, str((config.architectures or [""])[0]), None)
        with torch.device("meta"):
            model: nn.Module
            if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
                model = named(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(
                    config, trust_remote_code=trust_remote_code
                )
    except Exception as error:  # transformers raises about anything on a bad config
        hint = ""
        if "auto_map" in settings and not trust_remote_code:
            hint = " (its own code is run only with --trust-remote-code)"
        raise BadInput(
            f"no model can be built from {path}{hint}: {type(error).__name__}: {first_line(error)}"
        ) from error
    return model


class _Node(nn.Module):
    """Parameters and children under any name, without the rest of a module, of which there are many."""

    def __init__(self) -> None:
        self.__dict__.update(_parameters={}, _modules={}, _buffers={})


def _tree(shapes: Shapes, path: Path) -> tuple[nn.Module, bool]:
    """Bare modules with the tensors of a checkpoint as their parameters, for the one way of matching."""
    for name in shapes:
        if not all(name.split(".")) or name.count(".") > 100:
            raise BadInput(f"{path} has a tensor {name!r}, which is no parameter's name")
    try:
        values = {shape: torch.empty(shape or (), device="meta") for shape in set(shapes.values())}
    except RuntimeError as error:
        raise BadInput(f"{path} has a tensor of impossible shape: {first_line(error)}") from error
    root = _Node()
    for name in in_model_order({name: name for name in shapes}, findings=2):  # files have another order
        module = root
        *parents, attribute = name.split(".")
        for parent in parents:
            if parent not in module._modules:
                module._modules[parent] = _Node()
            module = module._modules[parent]  # type: ignore[assignment]
        module._parameters[attribute] = nn.Parameter(values[shapes[name]])
    return root, None not in shapes.values()


def first_line(error: BaseException) -> str:
    """Of another library's error, what there is room for."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
