"""What tests need to know of the versions that they run with; none of the marks skips in the main set."""

from importlib.metadata import version

import pytest
import torch

TRANSFORMERS = tuple(map(int, version("transformers").split(".")[:2]))

FUSED_EXPERTS = TRANSFORMERS >= (5, 0)
"""Whether a Qwen3-MoE has one tensor for all experts of a layer, or one for each."""

MEGATRON = tuple(map(int, version("megatron-core").split(".")[:2]))

GROUPED_MLP = MEGATRON < (0, 17)
"""Whether Megatron has a module with one tensor for all experts, which needs the package grouped_gemm."""

DEEPSPEED = tuple(map(int, version("deepspeed").split(".")[:2]))
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
TORCH_2_6 = TORCH == (2, 6)

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
needs_fsdp2_on_cpu = pytest.mark.skipif(TORCH_2_6, reason="FSDP2 of torch 2.6 is for GPUs alone")
needs_hsdp_on_cpu = pytest.mark.skipif(TORCH_2_6, reason="HSDP of torch 2.6 averages as gloo can't")
needs_fused_experts = pytest.mark.skipif(
    not FUSED_EXPERTS, reason="transformers has one tensor for all experts since 5"
)
needs_quantized_shards = pytest.mark.skipif(
    TORCH < (2, 13), reason="FSDP2 of torch 2.11 takes only parameters of floating point; 2.13 takes all"
)
needs_gemma3 = pytest.mark.skipif(
    TRANSFORMERS < (4, 52), reason="Megatron-Bridge imports what transformers has since 4.52"
)
needs_grouped_mlp = pytest.mark.skipif(not GROUPED_MLP, reason="megatron-core 0.17 has no GroupedMLP")
MUON = pytest.param("Muon", marks=needs_muon)
"""For `parametrize`."""
