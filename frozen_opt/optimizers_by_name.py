"""Optimizer factories by config: what the demo trains with, what preview measures, and a start for your own.

`build_optimizer` serves torch and FSDP; DeepSpeed and Megatron have one each.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from frozen_opt.config import lookup
from frozen_opt.errors import FreezeConfigError, listing
from frozen_opt.matching.names import module_list
from frozen_opt.parameters import trainable_found


def build_optimizer(model: nn.Module, config: object) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters; biases and norms without weight decay.

    Args:
        model: The model, wrapped or not.
        config: The role's node. Of its `optimizer_config`, this reads `optimizer` (a class of torch.optim,
            or of torch-optimizer where that is installed, or `Muon` for the hybrid: Muon for the hidden
            layers' matrices, AdamW for the rest), `lr`, `weight_decay`, `adam_betas` (where the class has
            betas) and `optimizer_kwargs` (handed to the class; for the hybrid see `HybridMuon`).

    Raises:
        FreezeConfigError: `optimizer_config` is missing, or names something that does not exist.
    """
    settings = lookup(config, "optimizer_config")
    if settings is None:
        raise FreezeConfigError(
            f"build_optimizer needs the role's node of the config, with optimizer_config in it, and got a "
            f"{type(config).__name__} without: pass config.trainer.policy, say"
        )
    name = lookup(settings, "optimizer") or "AdamW"
    kwargs = dict(lookup(settings, "optimizer_kwargs") or {})
    if name == "Muon":
        return HybridMuon(model, settings, kwargs)
    kind = optimizer_class(name)
    accepted = inspect.signature(kind).parameters
    for key, value in (("lr", "lr"), ("weight_decay", "weight_decay"), ("betas", "adam_betas")):
        setting = lookup(settings, value)
        if key in accepted and setting is not None:
            kwargs.setdefault(key, tuple(setting) if key == "betas" else setting)
    unknown = sorted(set(kwargs) - set(accepted))
    if unknown:
        raise FreezeConfigError(
            f"optimizer_config.optimizer_kwargs has {listing(unknown)}, which {name} does not take: it "
            f"takes {listing([key for key in accepted if key != 'params'], 30)}"
        )
    decay, rest = _decay_groups(model)
    if "weight_decay" not in accepted:  # LBFGS, for one, wants no groups either
        return kind([*decay, *rest], **kwargs)
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    return kind([group for group in groups if group["params"]], **kwargs)


class HybridMuon(torch.optim.Optimizer):
    """Muon for the matrices of the hidden layers, AdamW for everything else, as one optimizer.

    The split is that of Muon's author (https://kellerjordan.github.io/posts/muon): embeddings, the output
    head, norms, biases and whatever is no matrix go to AdamW. Works on DTensors as well.

    Args:
        model: Its trainable parameters are split.
        settings: `optimizer_config`: `lr`, `weight_decay` and `adam_betas`, for both where they apply.
        kwargs: `muon_lr`, `muon_weight_decay`, `muon_momentum`, `muon_nesterov`, `ns_steps`,
            `adjust_lr_fn` and `adamw_eps`, under MarinSkyRL's names.

    Raises:
        FreezeConfigError: No matrix is left for Muon, `kwargs` has another name in it, or torch is older
            than its Muon.
    """

    def __init__(self, model: nn.Module, settings: object, kwargs: Mapping[str, Any]) -> None:
        names = {
            "muon_lr": "lr",
            "muon_weight_decay": "weight_decay",
            "muon_momentum": "momentum",
            "muon_nesterov": "nesterov",
            "ns_steps": "ns_steps",
            "adjust_lr_fn": "adjust_lr_fn",
        }
        unknown = sorted(set(kwargs) - {*names, "adamw_eps"})
        if unknown:
            raise FreezeConfigError(
                f"optimizer_config.optimizer_kwargs has {listing(unknown)}, which Muon does not take: it "
                f"takes {listing([*names, 'adamw_eps'])}"
            )
        lr, weight_decay = lookup(settings, "lr"), lookup(settings, "weight_decay")
        shared = {
            key: value for key, value in (("lr", lr), ("weight_decay", weight_decay)) if value is not None
        }
        matrices, others = muon_split(model)
        if not matrices:
            raise FreezeConfigError(
                "optimizer_config.optimizer is Muon, but no matrix of a hidden layer is left to train: "
                "use AdamW, or freeze less"
            )
        muon = {names[key]: value for key, value in kwargs.items() if key in names}
        self.optimizers: list[torch.optim.Optimizer] = [
            optimizer_class("Muon")(matrices, **{**shared, **muon}),
        ]
        if others:
            adamw = dict(shared)
            if (betas := lookup(settings, "adam_betas")) is not None:
                adamw["betas"] = tuple(betas)
            if "adamw_eps" in kwargs:
                adamw["eps"] = kwargs["adamw_eps"]
            self.optimizers.append(torch.optim.AdamW(others, **adamw))
        super().__init__([*matrices, *others], {})
        self._share()

    def _share(self) -> None:
        """Show the two optimizers' own groups and state, so that schedulers and offloading reach them."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = _States(*(optimizer.state for optimizer in self.optimizers))  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._share()


class _States(ChainMap[torch.Tensor, Any]):
    """The states of several optimizers as one; each is a defaultdict, which would answer for the others."""

    def __getitem__(self, key: torch.Tensor) -> Any:
        for state in self.maps:
            if key in state:
                return state[key]
        raise KeyError(key)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    try:
        import torch_optimizer
    except ImportError:
        torch_optimizer = None
    for package in (torch.optim, torch_optimizer):
        kind = getattr(package, name, None)
        if (
            isinstance(kind, type)
            and issubclass(kind, torch.optim.Optimizer)
            and kind is not torch.optim.Optimizer
            and "params" in inspect.signature(kind).parameters
        ):
            return kind
    if name == "Muon":
        raise FreezeConfigError(
            f"optimizer_config.optimizer is Muon, which torch {torch.__version__} does not have: use torch "
            "2.9 or newer, or AdamW"
        )
    raise FreezeConfigError(
        f"optimizer_config.optimizer is {name!r}, and must be the name of a class in torch.optim, or in "
        "torch_optimizer where that is installed (pip install torch-optimizer), such as AdamW, or Muon"
    )


def _decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """By name and owner, not by shape: sharded parameters may be flat, or empty."""
    decay: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for found in trainable_found(model):
        plain = found.attribute.endswith("bias") or "norm" in type(found.owner).__name__.lower()
        (rest if plain else decay).append(found.parameter)
    return decay, rest


def muon_split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for found in trainable_found(model):
        outer = isinstance(found.owner, nn.Embedding) or _HEADS & set(found.name.split("."))
        (others if outer or found.parameter.ndim != 2 else matrices).append(found.parameter)
    return matrices, others


_HEADS = {"head", "lm_head", "embed_out", "output_layer", "score", "value_head"}
"""What architectures call the matrix after the last hidden layer."""


def build_deepspeed_optimizer(model: nn.Module, config: object) -> torch.optim.Optimizer:
    """The client optimizer, for `deepspeed.initialize(model=model, optimizer=..., config=...)`.

    As `build_optimizer` builds it, under `zero.Init` as well. DeepSpeed wants
    `"zero_allow_untested_optimizer": true` in its config for optimizers that it does not know.

    Args:
        model: The model, not yet in an engine.
        config: The role's node, with `optimizer_config` in it.

    Raises:
        FreezeConfigError: `optimizer_config` is missing, or names something that can't be built, or Muon.
    """
    if lookup(lookup(config, "optimizer_config"), "optimizer") == "Muon":
        raise FreezeConfigError(
            "optimizer_config.optimizer is Muon, which needs matrices, and ZeRO hands its optimizer flat "
            "tensors: choose Muon in DeepSpeed's own config in place of a client optimizer, or AdamW here"
        )
    return build_optimizer(model, config)


def build_megatron_optimizer(model: nn.Module | Sequence[nn.Module], config: object) -> Any:
    """Megatron's optimizer for the chunks, as `get_megatron_optimizer` builds it.

    Args:
        model: The chunk, or list of chunks, wrapped by Megatron's DDP.
        config: The role's node. Of its `optimizer_config`, this reads `optimizer` (`adam`, which is AdamW
            here, or `sgd`), `lr`, `adam_betas`, `weight_decay`, `max_grad_norm`, and `optimizer_kwargs`
            (any further settings of Megatron's `OptimizerConfig`). Precision and the use of the distributed
            optimizer are those of the model.

    Raises:
        FreezeConfigError: `optimizer_config` is missing, or has a setting that Megatron does not know.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = lookup(config, "optimizer_config")
    if settings is None:
        raise FreezeConfigError(
            "no optimizer_config in the role's config: it needs optimizer and lr, at least"
        )
    chunks: list[Any] = module_list(model)
    fields: dict[str, Any] = {
        "optimizer": _megatron_name(lookup(settings, "optimizer")),
        "bf16": chunks[0].config.bf16,
        "fp16": chunks[0].config.fp16,
        "params_dtype": chunks[0].config.params_dtype,
        "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
    }
    for ours, theirs in (("lr", "lr"), ("weight_decay", "weight_decay"), ("max_grad_norm", "clip_grad")):
        if (value := lookup(settings, ours)) is not None:
            fields[theirs] = value
    if (betas := lookup(settings, "adam_betas")) is not None:
        fields["adam_beta1"], fields["adam_beta2"] = betas
    fields |= dict(lookup(settings, "optimizer_kwargs") or {})
    known = [field.name for field in dataclasses.fields(OptimizerConfig)]
    if unknown := sorted(set(fields) - set(known)):
        raise FreezeConfigError(
            f"optimizer_config.optimizer_kwargs has {listing(unknown)}, which Megatron's OptimizerConfig "
            f"does not have: it has {listing(known, 100)}"
        )
    return get_megatron_optimizer(OptimizerConfig(**fields), chunks)


def _megatron_name(name: object) -> str:
    names = {None: "adam", "adam": "adam", "adamw": "adam", "sgd": "sgd"}
    key = name.lower() if isinstance(name, str) else name
    if key not in names:
        raise FreezeConfigError(
            f"optimizer_config.optimizer is {name!r}, and Megatron has adam (which is AdamW there) and sgd. "
            "For its Muon, decorate megatron.core.optimizer.muon.get_megatron_muon_optimizer"
        )
    return names[key]
