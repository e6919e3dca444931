"""The torch backend: its optimizers, its warnings, and models compiled and checkpointed."""

from typing import Any

import pytest
import torch
import torch_optimizer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import frozen_opt
from frozen_opt import with_freezing
from frozen_opt.optimizers_by_name import HybridMuon, build_optimizer
from tests.models import moved, snapshot, train, transformer
from tests.versions import MUON, needs_muon

FREEZE = ["*.mlp.gate.weight", "layers.0.attention.weight"]
FROZEN = {"layers.0.attention.weight", "layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"}


def node(name: str, **more: Any) -> dict[str, Any]:
    settings = {"optimizer": name, "lr": 1e-2, "weight_decay": 0.1, "adam_betas": [0.8, 0.9], **more}
    return {"freeze_parameters": FREEZE, "optimizer_config": settings}


@pytest.mark.parametrize("name", ["AdamW", "SGD", "LBFGS", "Adafactor", "Lamb", "RAdam", "NovoGrad", MUON])
def test_any_optimizer_by_name_trains_what_is_not_frozen(name: str) -> None:
    model = transformer()
    before = snapshot(model)
    optimizer = with_freezing("policy")(build_optimizer)(model, node(name))
    train(model, optimizer)
    assert set(before) - moved(model, before) == FROZEN


def test_the_settings_reach_the_optimizer() -> None:
    model = transformer()
    optimizer = build_optimizer(model, node("AdamW", optimizer_kwargs={"eps": 1e-5}))
    assert type(optimizer) is torch.optim.AdamW
    decayed, rest = optimizer.param_groups
    assert [group["weight_decay"] for group in (decayed, rest)] == [0.1, 0.0]
    assert {group["betas"] for group in (decayed, rest)} == {(0.8, 0.9)}
    assert {group["lr"] for group in (decayed, rest)} == {1e-2}
    assert {group["eps"] for group in (decayed, rest)} == {1e-5}
    assert rest["params"] == [layer.norm.weight for layer in model.layers]
    assert type(build_optimizer(model, node("Lamb"))) is torch_optimizer.Lamb


def test_biases_and_norms_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Embedding(2, 2))
    decayed, rest = build_optimizer(model, node("SGD")).param_groups
    assert len(decayed["params"]) == 2
    assert len(rest["params"]) == 3


def test_defaults_are_adamw_with_the_classes_own_settings() -> None:
    optimizer = build_optimizer(transformer(), {"optimizer_config": {"optimizer_kwargs": None}})
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == torch.optim.AdamW([nn.Parameter(torch.ones(1))]).defaults["lr"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (node("AdamX"), "'AdamX', and must be the name of a class in torch.optim"),
        (node("Optimizer"), "'Optimizer', and must be"),
        (node("Lookahead"), "'Lookahead', and must be"),
        (node("lr_scheduler"), "'lr_scheduler', and must be"),
        (
            node("AdamW", optimizer_kwargs={"epsilon": 1}),
            "has epsilon, which AdamW does not take: it takes lr",
        ),
        (node("Muon", optimizer_kwargs={"speed": 1}), "has speed, which Muon does not take"),
        ({"lr": 1}, "build_optimizer needs the role's node"),
    ],
)
def test_bad_settings_are_refused(config: Any, says: str) -> None:
    with pytest.raises(frozen_opt.FreezeConfigError, match=says):
        build_optimizer(transformer(), config)


@needs_muon
def test_hybrid_muon_splits_as_its_author_says() -> None:
    model = transformer()
    optimizer = build_optimizer(model, node("Muon", optimizer_kwargs={"muon_lr": 0.5, "adamw_eps": 1e-4}))
    assert isinstance(optimizer, HybridMuon)
    muon, adamw = optimizer.optimizers
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in adamw.param_groups[0]["params"]} == {
        "embedding.weight", "head.weight", "layers.0.norm.weight", "layers.1.norm.weight",
    }  # fmt: skip
    assert len(muon.param_groups[0]["params"]) == 8
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.5, 1e-2)
    assert (adamw.param_groups[0]["eps"], adamw.param_groups[0]["betas"]) == (1e-4, (0.8, 0.9))


@needs_muon
def test_hybrid_muon_is_an_optimizer_to_schedulers_and_checkpoints() -> None:
    model = transformer()
    optimizer = build_optimizer(model, node("Muon"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, steps=1)
    scheduler.step()
    assert all(group["lr"] == 0.5e-2 for part in optimizer.optimizers for group in part.param_groups)
    assert len(optimizer.state) == len(list(model.parameters()))
    again = build_optimizer(model, node("Muon"))
    again.load_state_dict(optimizer.state_dict())
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(value, again.state[parameter][key]) for key, value in state.items())
    assert [group["lr"] for group in again.param_groups] == [0.5e-2, 0.5e-2]


def test_muon_of_a_torch_that_lacks_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(frozen_opt.FreezeConfigError, match=r"does not have: use torch 2\.9"):
        build_optimizer(transformer(), node("Muon"))


def test_muon_without_a_matrix_is_refused() -> None:
    config = {**node("Muon"), "freeze_parameters": ["layers.*"]}
    with pytest.raises(frozen_opt.FreezeConfigError, match="no matrix of a hidden layer is left"):
        with_freezing("policy")(build_optimizer)(transformer(), config)


@pytest.mark.parametrize("how", ["compiled", "layers compiled", "layers checkpointed", "reentrant"])
def test_compiled_and_checkpointed_models_train_what_is_not_frozen(how: str) -> None:
    model = inner = transformer()
    if how == "compiled":
        model = torch.compile(model, backend="aot_eager")
    for i, layer in enumerate(inner.layers):
        if how == "layers compiled":
            inner.layers[i] = torch.compile(layer, backend="aot_eager")
        elif how == "layers checkpointed":
            inner.layers[i] = checkpoint_wrapper(layer)
        elif how == "reentrant":
            inner.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
    before = snapshot(model)
    optimizer = with_freezing("policy")(build_optimizer)(model, node("AdamW"))
    train(model, optimizer)
    assert set(before) - moved(model, before) == FROZEN


def test_running_statistics_that_still_move_are_warned_of(logs: list[Any]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    frozen_opt.freeze_parameters(model, ["0.*", "2.*"], role="policy")
    warnings = [record["message"] for record in logs if record["level"].name == "WARNING"]
    assert len(warnings) == 1
    assert "the running statistics of 0 are buffers, and still move" in warnings[0]


def qwen() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        )
    )  # fmt: skip


def gradients_in_layers(model: nn.Module) -> int:
    model.train()
    tokens = torch.arange(6)[None]
    loss = model(input_ids=tokens, labels=tokens).loss if isinstance(model, Qwen3MoeForCausalLM) else None
    loss = model(tokens).sum() if loss is None else loss
    loss.backward()
    return sum(p.grad is not None for name, p in frozen_opt.named_parameters(model) if "layers" in name)


def surprises(logs: list[Any]) -> list[str]:
    return [record["message"] for record in logs if "reentrant activation" in record["message"]]


def let_inputs_require_no_gradients(model: Any) -> None:
    """As in transformers 4; later ones let them require gradients once checkpointing is enabled."""
    if getattr(model, "_require_grads_hook", None) or getattr(model, "_require_grads_hooks", None):
        model.disable_input_require_grads()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_case_15_frozen_embeddings_under_reentrant_checkpointing(logs: list[Any]) -> None:
    model = qwen()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    let_inputs_require_no_gradients(model)
    frozen_opt.freeze_parameters(model, ["model.embed_tokens.weight"], role="policy")
    assert gradients_in_layers(model) == 0, "the surprise is real"
    assert len(surprises(logs)) == 1
    assert "use_reentrant=False" in surprises(logs)[0]
    assert "model.enable_input_require_grads()" in surprises(logs)[0]


@pytest.mark.parametrize("remedy", ["not reentrant", "inputs require gradients", "embeddings trained"])
def test_case_15_no_warning_where_there_is_no_surprise(remedy: str, logs: list[Any]) -> None:
    model = qwen()
    reentrant = remedy != "not reentrant"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    let_inputs_require_no_gradients(model)
    if remedy == "inputs require gradients":
        model.enable_input_require_grads()
    pattern = "lm_head.weight" if remedy == "embeddings trained" else "model.embed_tokens.weight"
    frozen_opt.freeze_parameters(model, [pattern], role="policy")
    assert gradients_in_layers(model) > 0
    assert not surprises(logs)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_case_15_with_torchs_own_wrapper(logs: list[Any]) -> None:
    model = transformer()
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
    frozen_opt.freeze_parameters(model, ["embedding.weight"], role="policy")
    assert gradients_in_layers(model) == 0
    assert len(surprises(logs)) == 1
