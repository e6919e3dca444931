"""SkyRL's own policy and critic workers, in Ray actors. Import after `stubs.skyrl()`."""

from pathlib import Path
from typing import Any

import ray
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPCriticWorkerBase, FSDPPolicyWorkerBase
from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
from skyrl.train.config import TrainerConfig
from skyrl.train.config.config import MixedPrecisionConfig

import frozen_opt
from tests.trainers import tiny


class Looks:
    """What the test asks a worker beside what SkyRL does."""

    def outcome(self, start: dict[str, torch.Tensor], role: str) -> tiny.Outcome:
        return tiny.outcome(self.model, self.optimizer, start, role)

    def weights(self) -> dict[str, torch.Tensor]:
        with tiny.qwen.in_full(self.model) as now:
            return {name: value.cpu().clone() for name, value in now.items()}

    def verify(self, role: str) -> None:
        frozen_opt.report(role).verify(self.model, self.optimizer)

    def begin_with(self, patterns: list[str], role: str, path: str) -> str:
        """The error with which the worker's start ends under another list."""
        getattr(self.cfg, role).freeze_parameters = patterns
        try:
            self.init_model(path, num_training_steps=10)
        except Exception as error:
            return repr(error)
        return ""


class Policy(Looks, FSDPPolicyWorkerBase):
    def sent(self) -> dict[str, torch.Tensor]:
        """What a weight sync sends."""
        return dict(self._build_weight_source(torch.float32, "nccl"))


class Critic(Looks, FSDPCriticWorkerBase):
    pass


def config(path: str, patterns: list[str]) -> TrainerConfig:
    """The trainer's config: the freeze list is one of its keys."""
    cfg = TrainerConfig(flash_attn=False, remove_microbatch_padding=False, gradient_checkpointing=False)
    cfg.micro_train_batch_size_per_gpu = cfg.micro_forward_batch_size_per_gpu = 4
    cfg.algorithm.temperature = 1.0
    cfg.algorithm.use_kl_loss = False
    cfg.algorithm.max_seq_len = 16
    for role in (cfg.policy, cfg.critic):
        role.model.path = path
        role.freeze_parameters = patterns
        role.fsdp_config.mixed_precision = MixedPrecisionConfig("fp32", "fp32", "fp32")
        role.optimizer_config.lr = 1e-2
        role.optimizer_config.weight_decay = 0.1
    return cfg


def batch() -> TrainingInputBatch:
    """Eight sequences of 16 tokens, the second half of which are the response."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, tiny.WORDS, (8, 16), generator=generator)
    response = torch.ones(8, 8)
    fields = {name: torch.randn(8, 8, generator=generator) for name in ("advantages", "returns", "values")}
    data = TrainingInputBatch(
        {
            "sequences": tokens,
            "attention_mask": torch.ones_like(tokens),
            "loss_mask": response,
            "response_mask": response.long(),
            "action_log_probs": torch.full((8, 8), -4.0),
            **fields,
        }
    )
    data.metadata = {"response_length": 8, "global_step": 0}
    return data


class Group:
    """Two workers of a role, as SkyRL starts them."""

    def __init__(self, role: str, path: str, patterns: list[str]) -> None:
        kind = ray.remote(num_gpus=1)({"policy": Policy, "critic": Critic}[role])
        self.actors = PPORayActorGroup(config(path, patterns), 1, 2, kind, num_gpus_per_actor=0.5)
        self.begin(path)

    def begin(self, path: str) -> None:
        ray.get(self.actors.async_init_model(path, num_training_steps=10))

    def call(self, method: str, *args: Any) -> list[Any]:
        return ray.get(self.actors.async_run_ray_method("pass_through", method, *args))

    def step(self) -> dict[str, float]:
        outputs = ray.get(self.actors.async_run_ray_method("mesh", "forward_backward", batch()))
        self.call("optim_step")
        return outputs[0].metrics

    def stop(self) -> None:
        for actor in self.actors._actor_handlers:
            ray.kill(actor)


def train_and_resume(role: str, path: str, folder: Path) -> dict[str, Any]:
    """Three steps, each with an offload before it; saved; one step more, at once and resumed.

    The policy is resumed by new workers, the critic by the same ones, which begin anew. At last, they begin
    with a list that matches nothing.
    """
    group = Group(role, path, tiny.PATTERNS)
    start = group.call("weights")[0]
    for _ in range(3):
        group.actors.offload_to_cpu()
        group.actors.backload_to_gpu()
        group.call("verify", role)
        metrics = group.step()
    found = {"trained": group.call("outcome", start, role), "metrics": metrics}
    checkpoint, export = str(folder / "checkpoint"), str(folder / "export")
    group.call("save_checkpoint", checkpoint)
    group.step()
    straight = group.call("weights")[0]
    if role == "policy":
        group.stop()
        resumed = Group(role, path, tiny.PATTERNS)
    else:
        resumed = group
        resumed.begin(path)
    resumed.call("load_checkpoint", checkpoint)
    resumed.step()
    resumed.call("verify", role)
    found |= {"resumed": resumed.call("outcome", start, role), "start": start}
    found["weights"] = [resumed.call("weights")[0], straight]
    if role == "policy":
        found["sent"] = resumed.call("sent")[0]
        resumed.call("save_hf_model", export, tiny.tokenizer())
    found["refusals"] = resumed.call("begin_with", tiny.TYPO, role, path)
    resumed.stop()
    return found
