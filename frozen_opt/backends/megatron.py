"""Megatron-Core: global layer and expert numbers, its gradient buffers, and its optimizers.

Freeze before Megatron's DDP wraps the chunks: it lays out its gradient buffers for what requires a gradient
at that time. Classes are known by their names, so that nothing is imported from Megatron unless it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from frozen_opt.backends.base import Backend
from frozen_opt.backends.buffers import moving_buffers
from frozen_opt.errors import UnsupportedBackendError, listing
from frozen_opt.matching.names import Found, Renumbering, Walk, register_renumbering

_MODULE = "megatron.core.transformer.module.MegatronModule"
_GPT = "megatron.core.models.gpt.gpt_model.GPTModel"
_DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
_MEGATRON_FSDP = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP",
    "megatron_fsdp.megatron_fsdp.MegatronFSDP",
)
_GROUPED_EXPERTS = "megatron.core.transformer.moe.experts.GroupedMLP"
_OPTIMIZERS = "megatron.core.optimizer."
_SHARDED = f"{_OPTIMIZERS}distrib_optimizer.DistributedOptimizer"


class MegatronBackend(Backend):
    """GPTModel and its kin, bare or wrapped, as one module or as a list of pipeline chunks."""

    name = "megatron"
    idle_ranks = True  # get_megatron_optimizer takes a stage with nothing to train

    def recognises(self, walk: Walk) -> bool:
        return _MODULE in walk.classes or not walk.classes.isdisjoint(_MEGATRON_FSDP)

    def refusal(self, walk: Walk, matched: Sequence[Found]) -> str | None:
        wrappers = _wrappers(walk)
        gathered = _gathered(wrappers)
        if any(id(parameter) in gathered for parameter in walk.parameters):
            return _GATHERED
        for wrapper in wrappers:
            buffered = set(map(id, _in_gradient_buffers(wrapper)))
            if names := [found.name for found in matched if id(found.parameter) in buffered]:
                advice = _TOO_LATE_FOR_FSDP if _is_a(wrapper, *_MEGATRON_FSDP) else ""
                return _TOO_LATE.format(names=listing(names)) + advice
        # DDP marks what it has a buffer for. It is not at hand where the chunks come unwrapped.
        if names := [found.name for found in matched if hasattr(found.parameter, "main_grad")]:
            return _TOO_LATE.format(names=listing(names))
        return None

    def thaw_refusal(self, walk: Walk, thawed: Sequence[Found]) -> str | None:
        wrappers = _wrappers(walk)
        if not wrappers and not any(hasattr(parameter, "main_grad") for parameter in walk.parameters):
            return None
        buffered = {id(parameter) for wrapper in wrappers for parameter in _in_gradient_buffers(wrapper)}
        if names := [found.name for found in thawed if id(found.parameter) not in buffered]:
            return _NO_PLACE.format(names=listing(names))
        return None

    def warnings(self, walk: Walk, matched: Sequence[Found]) -> list[str]:
        return [*moving_buffers(walk, matched), *_recompute(walk, matched)]

    def element_counts(self, walk: Walk, parameters: Sequence[nn.Parameter]) -> list[int]:
        wanted = set(map(id, parameters))
        shards = {
            id(parameter): _shards(name, parameter, owner, chunk)
            for chunk in walk.chunks
            for owner in chunk.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in wanted
        }
        counts = zip(parameters, super().element_counts(walk, parameters), strict=True)
        return [count * shards[id(parameter)] for parameter, count in counts]

    def resting(self, walk: Walk) -> Mapping[int, nn.Parameter]:
        return _gathered(_wrappers(walk))

    def optimizer_parameters(self, optimizer: Any) -> Sequence[torch.Tensor] | None:
        if not _is_a(optimizer, f"{_OPTIMIZERS}optimizer.MegatronOptimizer"):
            return None
        return list(_stepped(optimizer))


def _is_a(item: object, *qualified_names: str) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in qualified_names for cls in type(item).__mro__)


_TOO_LATE = (
    "Megatron has already wrapped the model, and {names} has a place in its gradient buffers: it would keep "
    "that memory, and the distributed optimizer would fail on it. Freeze before wrapping: "
    "provider.register_pre_wrap_hook(frozen_opt.freezing_hook(role, patterns)) on Megatron-Bridge, else "
    "frozen_opt.freeze_parameters(chunks, patterns, role=role) before DistributedDataParallel"
)
_GATHERED = (
    "Megatron-FSDP shows gathered parameters since a forward or an optimizer step, and the optimizer has "
    "others: call synchronize_param_gather() on each chunk first"
)
_NO_PLACE = (
    "Megatron wrapped the model while {names} was frozen, which the list no longer freezes: it has no place "
    "in the gradient buffers, and would not train. Call with the new list on the bare chunks, and wrap them "
    "anew"
)
_TOO_LATE_FOR_FSDP = ". Megatron-FSDP takes what was frozen before from megatron-core 0.17 on"


# --- names


def _global_layers(block: Any) -> Renumbering:
    """A pipeline stage numbers its layers from 0; each layer knows its place in the whole model, from 1."""
    return {
        id(block.layers): {
            local: str(layer.layer_number - 1)
            for local, layer in block.layers._modules.items()
            if hasattr(layer, "layer_number")
        }
    }


def _global_experts(moe: Any) -> Renumbering:
    """An expert-parallel rank numbers its experts from 0, as `local_experts.<i>`, or as `weight<i>`."""
    experts = list(enumerate(moe.local_expert_indices))
    numbers = {str(local): str(number) for local, number in experts}
    grouped = {
        f"{kind}{local}": f"{kind}{number}" for kind in ("weight", "bias") for local, number in experts
    }
    renumbering: dict[int, Mapping[str, str]] = {}
    for module in moe.experts.modules():
        if "weight0" in module._parameters:  # not the `weight1` and `weight2` of GroupedMLP's two layers
            renumbering[id(module)] = grouped
        elif "local_experts" in module._modules:
            renumbering[id(module.local_experts)] = numbers
    return renumbering


def _tied_output(model: Any) -> Renumbering:
    """The last pipeline stage has a copy of a tied embedding, which Megatron keeps equal to the first's.

    It goes by the embedding's name: were only one of them frozen, the other's stage would wait for ever for
    its gradient.
    """
    if (
        model.share_embeddings_and_output_weights
        and model.post_process
        and "embedding" not in model._modules
        and "output_layer" in model._modules
    ):
        return {id(model): {"output_layer": "embedding.word_embeddings"}}
    return {}


for _name in (
    "transformer.transformer_block.TransformerBlock",
    "transformer.multi_token_prediction.MultiTokenPredictionBlock",
    "ssm.mamba_block.MambaStack",
):
    register_renumbering(f"megatron.core.{_name}", _global_layers)
register_renumbering("megatron.core.transformer.moe.moe_layer.BaseMoELayer", _global_experts)
for _name in (_GPT, "megatron.core.models.mamba.mamba_model.MambaModel"):
    register_renumbering(_name, _tied_output)


# --- what is where


def _wrappers(walk: Walk) -> list[Any]:
    """What Megatron holds gradient memory in; its FSDP is known by its parameters as well."""
    wrappers = [*walk.wrappers, *(getattr(p, "_megatron_fsdp_model", None) for p in walk.parameters)]
    unique = {id(wrapper): wrapper for wrapper in wrappers if _is_a(wrapper, _DDP, *_MEGATRON_FSDP)}
    return list(unique.values())


def _gathered(wrappers: Sequence[Any]) -> dict[int, nn.Parameter]:
    """By id, what Megatron-FSDP shows from a forward or a step to the end of a backward -> its shard."""
    return {
        id(sharded.orig_param): sharded
        for wrapper in wrappers
        if _is_a(wrapper, *_MEGATRON_FSDP)
        for _, sharded in wrapper.param_and_grad_buffer.optimizer_named_parameters
    }


def _in_gradient_buffers(wrapper: Any) -> Iterator[torch.Tensor]:
    """The parameters for which a wrapper holds gradient memory, be they frozen by now or not."""
    if _is_a(wrapper, *_MEGATRON_FSDP):
        buffer = wrapper.param_and_grad_buffer
        for _, sharded in buffer.optimizer_named_parameters:
            if buffer.parameter_groups[buffer.param_to_param_group[sharded.orig_param]].requires_grad:
                yield from (sharded, sharded.orig_param)  # the model has them by turns
        return
    # From the instance's own attributes: every module has a method `buffers`.
    for buffer in (*vars(wrapper)["buffers"], *vars(wrapper)["expert_parallel_buffers"]):
        yield from buffer.param_index_map


def _shards(name: str, parameter: nn.Parameter, owner: Any, chunk: Any) -> int:
    """How many ranks hold a part of the parameter."""
    if not _is_split(name, parameter, owner):
        return 1
    own = vars(owner)
    group = own.get("_tp_group") or own.get("tp_group")  # Transformer Engine has one of its own: the second
    size = group.size() if group is not None else chunk.config.tensor_model_parallel_size
    # One tensor of all the experts that a rank has; each of its other tensors has a name of its own.
    return int(size * owner.ep_group.size() if _is_a(owner, _GROUPED_EXPERTS) else size)


def _is_split(name: str, parameter: nn.Parameter, owner: Any) -> bool:
    if _is_a(owner, _GROUPED_EXPERTS):
        return True
    if vars(owner).get("parallel_mode", "") is None:
        # Transformer Engine marks the weights of all its linears as split. For experts it is not told how
        # they are, and it knows of no split where each rank has the whole.
        kinds = " ".join(cls.__name__ for cls in type(owner).__mro__)
        return "ColumnParallel" in kinds or ("RowParallel" in kinds and name.startswith("weight"))
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _stepped(optimizer: Any) -> Iterator[torch.Tensor]:
    """The model's own parameters behind a Megatron optimizer, whatever copies or shards it steps."""
    if _is_a(optimizer, f"{_OPTIMIZERS}optimizer.ChainedOptimizer"):
        for part in optimizer.chained_optimizers:
            yield from _stepped(part)
        for per_rank in ("dp_cp_params_list", "expt_dp_params_list"):  # the layer-wise optimizer's
            for parameters in vars(optimizer).get(per_rank) or ():
                yield from parameters
    elif getattr(optimizer, "is_stub_optimizer", False):
        return
    elif _is_a(optimizer, f"{_OPTIMIZERS}optimizer.FP32Optimizer") or (
        _is_a(optimizer, _SHARDED) and optimizer.ddp_config.use_megatron_fsdp  # steps the model's own shards
    ):
        for group in optimizer.param_groups:
            yield from group["params"]
    elif _is_a(optimizer, _SHARDED):
        for buffer in optimizer.buffers:  # its own groups list those of which this rank has a shard
            yield from buffer.param_index_map
    elif _is_a(optimizer, f"{_OPTIMIZERS}optimizer.Float16OptimizerWithFloat16Params"):
        for group in (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups):
            yield from group
    else:
        raise UnsupportedBackendError(
            f"frozen_opt does not know the Megatron optimizer {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}, so it can't prove that nothing frozen is in it: teach it with "
            "register_backend"
        )


# --- warnings


def _recompute(walk: Walk, matched: Sequence[Found]) -> list[str]:
    """Megatron's activation checkpoint passes gradients only where an input of the segment requires one."""
    frozen = {id(found.parameter) for found in matched}

    def trains(module: nn.Module) -> bool:
        return any(p.requires_grad and id(p) not in frozen for p in module.parameters())

    def starves(model: Any) -> bool:
        if not model.pre_process or trains(model.embedding):
            return False
        if model.config.recompute_granularity == "full":
            return trains(model.decoder.layers)
        for layer in model.decoder.layers:
            if any(trains(part) for name, part in layer.named_children() if name != "mlp"):
                return False
            if trains(layer.mlp):
                return layer.recompute_mlp or getattr(layer.mlp, "moe_layer_recompute", False)
        return False

    modules = [module for chunk in walk.chunks for module in chunk.modules()]
    if not any(starves(module) for module in modules if _is_a(module, _GPT)):
        return []
    return [
        "everything before the first recomputed layer is frozen, and Megatron's activation recompute "
        "(recompute_granularity) passes no gradient into layers whose input requires none: they will not "
        'train. Use recompute_granularity="selective" with recompute_modules=["core_attn"], or let the '
        "embedding's output require a gradient: "
        "model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())"
    ]
