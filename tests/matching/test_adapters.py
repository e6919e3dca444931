"""PEFT: a list selects the same base parameters with adapters and without."""

from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import frozen_opt
from tests.models import moved, snapshot

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
)
SETTINGS = {
    "LoRA": peft.LoraConfig(r=2, target_modules="all-linear"),
    "LoRA on embeddings": peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "DoRA": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=True),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "OFT": peft.OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]),
    "modules to save": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tokens": peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2]),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
BARE = {name: parameter.shape for name, parameter in Qwen3ForCausalLM(CONFIG).named_parameters()}


def adapted(kind: str) -> nn.Module:
    return peft.get_peft_model(Qwen3ForCausalLM(CONFIG), SETTINGS[kind])


@pytest.mark.parametrize("kind", SETTINGS)
def test_case_30_the_base_keeps_its_names(kind: str) -> None:
    model = adapted(kind)
    names = {name: parameter.shape for name, parameter in frozen_opt.named_parameters(model)}
    assert {name: names.get(name) for name in BARE} == BARE
    trained = {name for name, parameter in frozen_opt.named_parameters(model) if parameter.requires_grad}
    assert trained
    # PEFT's prompts see the embeddings under one more name.
    assert trained == names.keys() - BARE.keys() - {"word_embeddings.weight"}


@pytest.mark.parametrize(
    "patterns", [["model.layers.1.*", "!*.lora_*"], ["*.q_proj.weight"], ["lm_head.weight"]]
)
def test_case_30_a_list_selects_the_same_base_with_lora_and_without(
    patterns: list[str], logs: list[Any]
) -> None:
    with_lora = frozen_opt.freeze_parameters(adapted("LoRA"), patterns, role="policy")
    patterns = [pattern for pattern in patterns if "lora" not in pattern]
    bare = frozen_opt.freeze_parameters(Qwen3ForCausalLM(CONFIG), patterns, role="critic")
    assert (with_lora.names, with_lora.element_count) == (bare.names, bare.element_count)
    assert [record for record in logs if record["level"].name == "WARNING"] == []


def test_case_30_freezing_adapters_along_with_the_base_is_warned_of(logs: list[Any]) -> None:
    report = frozen_opt.freeze_parameters(adapted("LoRA"), ["*.self_attn.*"], role="policy")
    assert sum("lora_" in name for name in report.names) == 16
    (warning,) = [record["message"] for record in logs if record["level"].name == "WARNING"]
    assert "freezes 16 parameters of adapters along with the base" in warning
    assert '"!*.lora_*"' in warning
    frozen_opt.freeze_parameters(adapted("LoRA"), ["*.0.*.lora_A.*"], role="critic")  # they alone are meant
    assert len(logs) == 3


def test_case_30_an_adapter_within_another_wrapper_is_warned_of_as_well(logs: list[Any]) -> None:
    frozen_opt.freeze_parameters(adapted("tokens"), ["*.embed_tokens.*"], role="policy")
    (warning,) = [record["message"] for record in logs if record["level"].name == "WARNING"]
    assert "freezes 1 parameters of adapters along with the base" in warning
    assert "model.embed_tokens.trainable_tokens_delta.default" in warning


def test_case_30_a_frozen_adapter_stays_and_the_others_train() -> None:
    model = adapted("LoRA")
    decorate = frozen_opt.with_freezing("policy", patterns=["*.layers.0.*.lora_*"])
    optimizer = decorate(
        lambda model: torch.optim.AdamW(frozen_opt.trainable_parameters(model), weight_decay=0.1)
    )(model)
    before = snapshot(model)
    for _ in range(3):
        model(input_ids=torch.randint(0, 64, (2, 6)), labels=torch.randint(0, 64, (2, 6))).loss.backward()
        optimizer.step()
    trained = {name for name in before if ".layers.1." in name and "lora_" in name}
    assert moved(model, before) == trained
