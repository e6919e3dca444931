"""A model to look at: from a config, from the names in a checkpoint, or from the user's own function.

Built on the meta device, so that it takes no memory. Nothing is downloaded, and no code runs that the user
has not named.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from frozen_opt.commands.bad_input import BadInput, first_line
from frozen_opt.commands.safetensors_header import Shapes, read_header, read_index, read_json
from frozen_opt.errors import listing
from frozen_opt.matching.order import in_model_order


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
    if os.path.isdir(path):
        path = _within(path)
    if not os.path.exists(path):
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
        if os.path.exists(folder / name):
            return folder / name
    raise BadInput(f"{folder} has neither config.json nor model.safetensors.index.json nor model.safetensors")


_MAX_MODULES = 150_000
_MOST = {
    re.compile(r"(layers?|blocks|depths?|stages)$", re.I): 1000,
    re.compile(r"(experts|heads?|groups|labels|codebooks|bins)$", re.I): 100_000,
    re.compile(""): 1 << 40,
}
"""By the end of a setting's name: more than any model has."""


def _check_counts(path: Path, settings: Any, key: str = "") -> None:
    """Refuse, at any depth of a config, a number of things that would take for ever to build."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            _check_counts(path, value, name)
    elif isinstance(settings, list):
        for value in settings:
            _check_counts(path, value, key)
    elif isinstance(settings, int | float):
        most = next(most for kind, most in _MOST.items() if kind.search(key))
        if settings > most:
            raise BadInput(f"{path} has {key} = {settings}, for which no model is built")


def _transformers_model(path: Path, settings: Mapping[str, Any], trust_remote_code: bool) -> nn.Module:
    _check_counts(path, settings)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        with _quiet():
            import torch._dynamo  # computes with tensors as it is imported, which torch 2.6 can't on meta
            import transformers
    except ModuleNotFoundError as error:
        raise BadInput(
            f"a model from its config needs {error.name}: pip install 'frozen_opt[demo]'"
        ) from error
    transformers.logging.set_verbosity_error()
    try:
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(
                path.parent if path.name == "config.json" else path,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
            )
            with torch.device("meta"), _limited_modules():
                return _build(path, config, settings, trust_remote_code)
    except BadInput:
        raise
    except Exception as error:  # transformers raises about anything on a bad config
        hint = ""
        if "auto_map" in settings and not trust_remote_code:
            hint = _OWN_CODE
        raise BadInput(
            f"no model can be built from {path}{hint}: {type(error).__name__}: {first_line(error)}"
        ) from error


_OWN_CODE = " (its own code is run only with --trust-remote-code)"


def _build(path: Path, config: Any, settings: Mapping[str, Any], trust_remote_code: bool) -> nn.Module:
    """The model that a trainer would build: of the named architecture, or of the causal models' kind."""
    import transformers

    named = getattr(config, "architectures", None) or []
    named = [named] if isinstance(named, str) else list(named)
    own = settings.get("auto_map")
    own = own if isinstance(own, Mapping) else {}
    tried = []
    for name in named if all(isinstance(name, str) for name in named) else map(str, named):
        kind = next((key for key, code in own.items() if str(code).rpartition(".")[2] == name), "")
        if trust_remote_code and kind.startswith("AutoModel") and hasattr(transformers, kind):
            model: nn.Module = getattr(transformers, kind).from_config(config, trust_remote_code=True)
            return model
        known = getattr(transformers, name, None)
        if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
            return known(config)  # type: ignore[no-any-return]
        tried.append(f"transformers.{name}")
    if tried:
        tried += [f"{key} of its auto_map" for key in own if trust_remote_code]
        raise BadInput(
            f"{path} names an architecture that transformers {transformers.__version__} lacks"
            f"{_OWN_CODE if own and not trust_remote_code else ''}; tried: {listing(tried)}. Give the model "
            "by --factory, or name in architectures what the trainer builds"
        )
    return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
        config, trust_remote_code=trust_remote_code
    )


@contextmanager
def _limited_modules() -> Iterator[None]:
    """Stop a build that registers more modules than any model has."""
    left = _MAX_MODULES

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise BadInput(f"the config makes a model of more than {_MAX_MODULES:,} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers and its own imports log, warn of and print: it is no answer to the user."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


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
    for name in in_model_order({name: name for name in shapes}):  # files have another order
        module = root
        *parents, attribute = name.split(".")
        for parent in parents:
            if parent not in module._modules:
                module._modules[parent] = _Node()
            module = module._modules[parent]  # type: ignore[assignment]
        module._parameters[attribute] = nn.Parameter(values[shapes[name]])
    return root, None not in shapes.values()
