"""verl's FSDP engine. Import after `stubs.verl()`, in a rank."""

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

import frozen_opt
from tests.ranks import qwen
from tests.trainers import tiny

ROLE = "language_model"


def engine(strategy: str, path: str, patterns: list[str]) -> Any:
    """The actor's engine; parameters and optimizer are offloaded between uses."""
    built = FSDPEngineWithLMHead(  # the registry of engines has none for a CPU
        model_config=HFModelConfig(
            path=path,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            param_offload=True,
            optimizer_offload=True,
            use_orig_params=True,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=4,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, weight_decay=0.1, total_training_steps=10, freeze_parameters=patterns
        ),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def batch(rank: int) -> TensorDict:
    """Four sequences of 16 tokens, without padding as verl has them."""
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(3, tiny.WORDS, (16,), generator=generator) for _ in range(4)]

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(16)] * 4),
            "loss_mask": nested([torch.ones(16)] * 4),
        },
        batch_size=4,
    )
    settings = {"use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}
    tensordict_utils.assign_non_tensor(data, temperature=1.0, pad_mode="no_padding", **settings)
    return data


def loss(model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
    value = -model_output["log_probs"].values().mean()
    return value, {"actor/loss": value.item()}


def step(actor: Any) -> dict[str, Any]:
    with actor.train_mode():
        found = actor.train_batch(batch(actor.rank), loss)["metrics"]
        actor.lr_scheduler_step()
    return found


def train_and_resume(strategy: str, path: str, folder: Path) -> dict[str, Any]:
    """Three steps, with the offload that each brings; saved; one step more, at once and resumed."""
    first = engine(strategy, path, tiny.PATTERNS)
    for _ in range(3):
        metrics = step(first)
        frozen_opt.report(ROLE).verify(first.module, first.optimizer)
    trained = tiny.outcome(first.module, first.optimizer, role=ROLE)
    first.save_checkpoint(str(folder))
    step(first)
    straight = qwen.snapshot(first.module)
    resumed = engine(strategy, path, tiny.PATTERNS)
    resumed.load_checkpoint(str(folder), del_local_after_load=False)
    step(resumed)
    sent, _ = resumed.get_per_tensor_param()
    return {
        "trained": trained,
        "metrics": metrics,
        "resumed": tiny.outcome(resumed.module, resumed.optimizer, role=ROLE),
        "sent": {name: value.detach().cpu().clone() for name, value in sent},
        "weights": [qwen.snapshot(resumed.module), straight],
    }
