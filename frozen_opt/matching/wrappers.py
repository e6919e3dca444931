"""Execution wrappers: modules that run another one, and add a component to its parameters' names.

They are known by their type (any class of the MRO, by qualified name), never by the text of a name: an
architecture may well own a submodule called `module` or `_orig_mod`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# Classes are named, not imported: a process that never imports DeepSpeed holds none of its engines.
_WRAPPERS: dict[str, str] = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.optim.swa_utils.AveragedModel": "module",
    "megatron.core.distributed.data_parallel_base._BaseDataParallel": "module",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
    "megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
    "megatron.core.transformer.module.Float16Module": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
    "peft.tuners.tuners_utils.BaseTunerLayer": "base_layer",
    "peft.utils.other.AuxiliaryTrainingWrapper": "original_module",
    "peft.utils.other.ModulesToSaveWrapper": "original_module",
    "peft.utils.other.TrainableTokensWrapper": "token_adapter",
    "skyrl_train.model_wrapper.HFModelWrapper": "model",
    "skyrl.backends.skyrl_train.workers.model_wrapper.HFModelWrapper": "model",
}


def register_wrapper(cls_or_qualified_name: type[nn.Module] | str, attribute: str) -> None:
    """Teach the naming one more execution wrapper; its subclasses count as well.

    Args:
        cls_or_qualified_name: The class, or `package.module.Class` where it should not be imported.
        attribute: The name under which it registers the module that it wraps.
    """
    name = cls_or_qualified_name
    _WRAPPERS[name if isinstance(name, str) else qualified_name(name)] = attribute


def wrapper_attribute(class_names: Iterable[str]) -> str | None:
    """The attribute under which an execution wrapper holds what it wraps; None of any other module.

    Args:
        class_names: Qualified names of a module's class and its bases, in the order of the MRO.
    """
    return next((_WRAPPERS[name] for name in class_names if name in _WRAPPERS), None)


def qualified_name(cls: type) -> str:
    """`package.module.Class`, as tables name classes that must not be imported."""
    return f"{cls.__module__}.{cls.__qualname__}"
