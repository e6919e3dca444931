"""Real Megatron-Core on CPU and gloo: tiny GPTModels in any layout, their DDP, schedule and optimizers.

Megatron asks for CUDA tensors and CUDA random state throughout. `cpu()` answers with the CPU instead; the
models, wrappers, gradient buffers, schedules and optimizers are Megatron's own.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from frozen_opt.matching.names import walk
from tests.versions import GROUPED_MLP, MEGATRON

VOCABULARY, LENGTH, HIDDEN = 64, 8, 16


class _OnCpu(TorchFunctionMode):
    """Tensors asked of CUDA come from the CPU; CPU tensors call themselves CUDA ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.device and str(args[0]).startswith("cuda"):
            args = ("cpu",)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")  # the mixed-precision optimizers compare it
        return result


def cpu() -> None:
    """Put this process on the CPU, for good."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Event = torch.cuda.Stream = _Stream
    torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    random.initialize_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER.fork = lambda name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # 0.16.1 reads it without Transformer Engine, where it is undefined
    if GROUPED_MLP:
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
        grouped_gemm_util.ops = _GroupedGemm
    torch.compiler.set_stance("force_eager")  # Megatron compiles its activations: a minute on a CPU
    _OnCpu().__enter__()


def meshes_on_cpu() -> None:
    """What shards over a device mesh of its own asks for one of GPUs."""
    from torch.distributed.device_mesh import DeviceMesh

    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(lambda group, device_type, **more: from_group(group, "cpu", **more))


class _Stream:
    """A stream, and an event on it: on the CPU there is nothing to wait for."""

    def wait(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = wait

    def record_event(self) -> Any:
        return self


class _GroupedGemm:
    @staticmethod
    def gmm(tokens: Any, weights: Any, batch_sizes: Any, trans_b: bool = False) -> Any:
        parts = torch.split(tokens, batch_sizes.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


@dataclass
class Layout:
    """How the model is spread over the ranks, and what it is made of."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    dp: int = 1
    """Data-parallel ranks, where ep is 1: experts are spread over data-parallel ranks."""
    experts: int | None = 4
    grouped: str | None = None
    """`legacy` for one tensor of all experts, `te` for Transformer Engine's `weight<i>`."""
    tied: bool = False
    bf16: bool = False
    gpt: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings of GPTModel, and of TransformerConfig."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * max(self.ep, self.dp)

    def chunks(self) -> list[Any]:
        """This rank's chunks of the bare model, with weights that depend on their global names alone."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        cpu()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                self.tp, self.pp, self.vpp, expert_model_parallel_size=self.ep
            )
        settings: dict[str, Any] = {
            "num_layers": 4,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "use_cpu_initialization": True,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "expert_model_parallel_size": self.ep,
            "pipeline_dtype": torch.bfloat16 if self.bf16 else torch.float32,
            "bf16": self.bf16,
            "batch_p2p_comm": False,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
        }
        if self.experts:
            settings |= {
                "num_moe_experts": self.experts,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": HIDDEN,
                "moe_token_dispatcher_type": "allgather",
                "moe_grouped_gemm": bool(self.grouped),
            }
        config = TransformerConfig(**settings | self.more)
        chunks = []
        for stage in range(self.vpp) if self.vpp else [None]:
            first = parallel_state.is_pipeline_first_stage(stage is None, stage)
            last = parallel_state.is_pipeline_last_stage(stage is None, stage)
            chunks.append(
                GPTModel(
                    config,
                    _layer(self),
                    vocab_size=VOCABULARY,
                    max_sequence_length=LENGTH,
                    pre_process=first,
                    post_process=last,
                    share_embeddings_and_output_weights=self.tied,
                    mtp_block_spec=_mtp(config, self, stage) if last else None,
                    vp_stage=stage,
                    **self.gpt,
                )
            )
        fill(chunks)
        return chunks


def _layer(layout: Layout) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_layer_local_spec(num_experts=layout.experts, moe_grouped_gemm=bool(layout.grouped))
    if layout.grouped == "te":
        grouped = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        layer = spec.submodules.mlp
        if MEGATRON < (0, 17):
            layer.submodules.experts = ModuleSpec(TEGroupedMLP, submodules=grouped)
        else:
            layer.keywords["submodules"].experts = partial(TEGroupedMLP, submodules=grouped)
    return spec


def _mtp(config: Any, layout: Layout, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, _layer(layout), use_transformer_engine=False, vp_stage=stage)


class GroupedLinear(torch.nn.Module):
    """In place of Transformer Engine's, which needs a GPU: one parameter for each local expert."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        for expert in range(experts):
            weight = torch.nn.Parameter(torch.empty(outputs, inputs))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, tokens: Any, tokens_per_expert: list[int]) -> Any:
        parts = zip(torch.split(tokens, tokens_per_expert), self.parameters(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts]), None


def fill(chunks: list[Any]) -> None:
    """Give each parameter the values that belong to its canonical name, or this rank's part of them."""
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_world_size(), _tensor_rank()
    expert = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    for found in walk(chunks).found:
        if "norm" in found.name:
            continue
        parameter, dimension, (parts, part) = found.parameter, 0, (1, 0)
        shape = list(parameter.shape)
        if type(found.owner).__name__ == "GroupedMLP":  # experts one after the other, whatever its shape says
            shape, (parts, part) = [parameter.numel()], expert
        elif getattr(parameter, "tensor_model_parallel", False):
            dimension, (parts, part) = parameter.partition_dim, tensor
        shape[dimension] *= parts
        seed = int.from_bytes(hashlib.blake2b(found.name.encode(), digest_size=6).digest())
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
        parameter.data.copy_(full.chunk(parts, dimension)[part].reshape(parameter.shape))


def _tensor_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank()


def wrap(chunks: list[Any], *, distributed_optimizer: bool = False, **more: Any) -> list[Any]:
    """The chunks in Megatron's Float16Module, if they are to be bf16, and in its DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = chunks[0].config
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=config.bf16, **more
    )
    wrapped = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
    return [DistributedDataParallel(config, settings, chunk) for chunk in wrapped]


def batches(step: int) -> list[torch.Tensor]:
    """The microbatches of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator) for _ in range(2)]


def run_step(chunks: list[Any], optimizer: Any, step: int) -> float | None:
    """One step by Megatron's own schedule. The loss, where the last pipeline stage is."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(data: Iterator[torch.Tensor], chunk: Any) -> Any:
        tokens = next(data)
        output = chunk(tokens, torch.arange(LENGTH)[None], None, labels=tokens.roll(1, -1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches(step)) for _ in chunks] if len(chunks) > 1 else iter(batches(step)),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    assert optimizer.step()[0]
    return float(torch.stack([loss["loss"] for loss in losses]).mean()) if losses else None


def run_bare_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """The same step on the bare model in one process, by torch alone."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MTPLossAutoScaler.set_loss_scale(torch.tensor(0.5))  # its loss joins in the backward only
    optimizer.zero_grad()
    total = 0.0
    for tokens in batches(step):
        loss = model(tokens, torch.arange(LENGTH)[None], None, labels=tokens.roll(1, -1)).mean() / 2
        loss.backward()
        total += float(loss.detach())
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1  # it clips
    optimizer.step()
    return total
