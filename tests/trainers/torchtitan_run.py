"""torchtitan's own trainer on a tiny Qwen3-MoE. Import after `stubs.torchtitan()`, in a rank."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models import qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from frozen_opt import decorate, metrics, with_freezing

SIZE, WORDS, LAYERS = 32, 64, 4


class FrozenOptimizers(OptimizersContainer):
    """The recipe with a config key; without one, `decorate` takes a line."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        freeze_parameters: list[str] = field(default_factory=list)

    @with_freezing("policy")
    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)


class Metrics(MetricsProcessor):
    """Keeps what torchtitan logs, with the freeze's own metrics."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    logged: list[dict[str, Any]]

    def log(self, *args: Any, extra_metrics: dict[str, Any], **more: Any) -> None:
        extra_metrics = {**extra_metrics, **metrics()}
        super().log(*args, extra_metrics=extra_metrics, **more)
        self.__dict__.setdefault("logged", []).append(extra_metrics)


class Data(BaseDataLoader):
    """Batches that depend on the step and the rank alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.count, self.rank, self.shape = 0, dp_rank, (local_batch_size, seq_len)

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(100 * self.count + self.rank)
            self.count += 1
            tokens = torch.randint(0, WORDS, self.shape, generator=generator)
            positions = torch.arange(self.shape[1]).expand(self.shape)
            yield {"input": tokens, "positions": positions}, tokens.roll(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {f"count{self.rank}": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict[f"count{self.rank}"]


class Tokenizer(BaseTokenizer):
    """None is needed: the data are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def model() -> Any:
    """A small Qwen3-MoE, as a spec of torchtitan."""
    rope = qwen3.CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4)
    experts = {"num_experts": 4, "top_k": 2, "moe_hidden_dim": 16, "moe_comm_backend": "standard"}
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "attn_backend": "flex", "rope": rope}
    layers = qwen3._build_qwen3_moe_layers(n_layers=LAYERS, dim=SIZE, **experts, **heads)
    for layer in layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec = qwen3.model_registry("debugmodel_moe")
    spec.model = qwen3.Qwen3Model.Config(
        vocab_size=WORDS,
        dim=SIZE,
        norm=qwen3._qwen3_norm(SIZE),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=WORDS, embedding_dim=SIZE, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=qwen3.Linear.Config(in_features=SIZE, out_features=WORDS, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    return spec


def trainer(folder: Path, patterns: list[str], steps: int, pipeline: int) -> Trainer:
    """A trainer as torchtitan's config builds it; it resumes from what lies in the folder."""
    optimizer = default_adamw(lr=1e-2)
    if pipeline == 1:
        groups = optimizer.param_groups
        optimizer = FrozenOptimizers.Config(param_groups=groups, freeze_parameters=patterns)
    else:
        factory = f"{OptimizersContainer.__module__}:OptimizersContainer.__init__"
        decorate(factory, "policy", patterns=patterns)
    optimizer.implementation = "for-loop"
    return Trainer.Config(
        model_spec=model(),
        dump_folder=str(folder),
        tokenizer=Tokenizer.Config(),
        dataloader=Data.Config(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, total_steps=10),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        training=TrainingConfig(
            local_batch_size=4,
            seq_len=16,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        # The default backend's spmd_types does not get through fully_shard of torch 2.13.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", pipeline_parallel_degree=pipeline),
        checkpoint=CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False),
        metrics=Metrics.Config(log_freq=1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    ).build()


def train(folder: Path, patterns: list[str], steps: int, pipeline: int) -> dict[str, Any]:
    """Train to this number of steps, and tell what this rank's parts are before and after."""
    titan = trainer(folder, patterns, steps, pipeline)
    start = weights(titan)
    titan.train()
    parameters = [pair for part in titan.model_parts for pair in part.named_parameters()]
    states = [optimizer.state for optimizer in titan.optimizers]
    titan.close()
    return {
        "start": start,
        "weights": weights(titan),
        "with_state": [name for name, each in parameters if any(state.get(each) for state in states)],
        "steps": {int(each["step"]) for state in states for each in state.values()},
        "metrics": titan.metrics_processor.logged[-1],
        "sizes": {name: each.numel() for name, each in parameters},
        "exported": sorted(titan.checkpointer.sd_adapter.to_hf(weights(titan))) if pipeline == 1 else [],
    }


def weights(titan: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().full_tensor().clone()
        for part in titan.model_parts
        for name, value in part.named_parameters()
    }
