"""Megatron-Bridge, for real: its provider's pre-wrap hook, and Hugging Face names by its mapping registry."""

import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

import frozen_opt
from tests.ranks.launch import run_ranks
from tests.ranks.megatron_cpu import HIDDEN, LENGTH, VOCABULARY, cpu, run_step
from tests.versions import MEGATRON, needs_gemma3

BRIDGE = "megatron-bridge==" + ("0.3.1" if MEGATRON < (0, 17) else "0.6.2")

pytestmark = [needs_gemma3, pytest.mark.xdist_group("megatron")]  # one worker installs it, once


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Megatron-Bridge is installed, without its dependencies: most of them are built for CUDA only."""
    folder = tmp_path_factory.mktemp("bridge")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), BRIDGE], check=True, timeout=120)
    return folder


class _StandIn(types.ModuleType):
    """A module for GPUs: whatever is asked of it is a class that takes anything, also as a decorator."""

    __path__: list[str] = []
    __version__ = "2.9"  # Megatron asks Transformer Engine's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (), {"__init__": _anything, "__call__": _anything})


class _Kind(type):
    __getattr__ = _StandIn.__getattr__


def _anything(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


class _ForGPUs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        gpu_only = name.split(".")[0] in ("transformer_engine", "triton")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if gpu_only else None

    def create_module(self, spec: Any) -> Any:
        return _StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def load(folder: Path) -> tuple[Any, Any]:
    """Megatron-Bridge's provider of a small Qwen3-MoE, and its mapping registry."""
    import tests.ranks.megatron_preload  # noqa: F401  # looks for the real Transformer Engine, and finds none

    cpu()
    sys.path.append(str(folder))
    sys.meta_path.append(_ForGPUs())
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    provider = GPTModelProvider(
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, qk_layernorm=True),
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        moe_token_dispatcher_type="allgather",
        vocab_size=VOCABULARY,
        seq_length=LENGTH,
        normalization="LayerNorm",  # torch's RMSNorm lacks what the local spec asks of it
        qk_layernorm=True,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=False,
        params_dtype=torch.float32,
        autocast_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    return provider, Qwen3MoEBridge().mapping_registry()


def auto_bridge() -> Any:
    """The AutoBridge of a small Qwen3-MoE, once `load` has made it importable."""
    from megatron.bridge import AutoBridge
    from transformers import Qwen3MoeConfig

    return AutoBridge.from_hf_config(Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]))


def build(provider: Any, **more: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    parallel_state.initialize_model_parallel()  # the provider's own way sets CUDA's random state as well
    provider.finalize()
    return provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(), use_cpu_initialization=True, **more
    )


def freeze_routers(folder: Path) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    provider, registry = load(folder)
    patterns = ["*.mlp.gate.weight"]
    logs: list[Any] = []
    logger.add(lambda message: logs.append(message.record["extra"].get("role")), level="INFO")
    provider.register_pre_wrap_hook(frozen_opt.freezing_hook("policy", patterns, name_map=registry))
    chunks = build(provider)
    factory = frozen_opt.with_freezing("policy", patterns=patterns, name_map=registry)(get_megatron_optimizer)
    optimizer = factory(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.0), chunks)
    before = {name: tensor.clone() for name, tensor in frozen_opt.named_parameters(chunks)}
    for step in range(3):
        run_step(chunks, optimizer, step)
    still = [
        name for name, tensor in frozen_opt.named_parameters(chunks) if torch.equal(tensor, before[name])
    ]
    return frozen_opt.report("policy"), still, logs


def test_hf_names_freeze_the_routers_of_a_bridge_model(bridge: Path) -> None:
    report, still, logs = run_ranks(freeze_routers, 1, bridge)[0]
    assert report.names == ("decoder.layers.0.mlp.router.weight", "decoder.layers.1.mlp.router.weight")
    assert report.backend == "megatron"
    assert report.element_count == 2 * 4 * HIDDEN
    assert still == list(report.names)
    assert logs == ["policy"]  # the hook's; the factory found everything frozen


def by_auto_bridge(folder: Path) -> Any:
    provider, registry = load(folder)
    bridge = auto_bridge()
    assert not hasattr(bridge, "mapping_registry")
    chunks = build(provider, wrap_with_ddp=False)
    plans = [
        frozen_opt.plan_freezing(chunks, ["*.mlp.gate.weight"], role="policy", name_map=name_map)
        for name_map in (bridge, registry)
    ]
    logs: list[str] = []
    logger.add(lambda message: logs.append(message.record["message"]), level="INFO")
    plans[0].apply()
    with pytest.raises(frozen_opt.FreezeConfigError, match=r"name_map is a builtins\.dict, and must"):
        frozen_opt.plan_freezing(chunks, ["*"], role="policy", name_map={})
    return plans[0].names == plans[1].names, plans[0].mapped, logs


def test_case_31_an_auto_bridge_is_a_name_map_and_its_names_are_logged(bridge: Path) -> None:
    ((same, mapped, logs),) = run_ranks(by_auto_bridge, 1, bridge)
    assert same
    names = [f"decoder.layers.{layer}.mlp.router.weight" for layer in (0, 1)]
    assert mapped == {name: (f"model.layers.{layer}.mlp.gate.weight",) for layer, name in enumerate(names)}
    assert f"{names[0]} (matched as model.layers.0.mlp.gate.weight)" in logs[0]


def plan_parts(folder: Path) -> Any:
    provider, registry = load(folder)
    chunks = build(provider, wrap_with_ddp=False)

    def plan(*parts: str) -> Any:
        patterns = [f"*.0.self_attn.{part}_proj.weight" for part in parts]
        return frozen_opt.plan_freezing(chunks, patterns, role="policy", name_map=registry)

    with pytest.raises(frozen_opt.FreezeConfigError) as refusal:
        plan("q")
    return str(refusal.value), plan("q", "k", "v").names


def test_part_of_a_fused_tensor_is_refused_and_the_whole_is_not(bridge: Path) -> None:
    refusal, names = run_ranks(plan_parts, 1, bridge)[0]
    assert "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight as well" in refusal
    assert names == ("decoder.layers.0.self_attention.linear_qkv.weight",)
