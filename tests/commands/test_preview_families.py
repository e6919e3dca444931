"""For many families of transformers, preview lists exactly what freezing the built model freezes."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import frozen_opt
from frozen_opt.matching.braces import fold
from tests.commands.test_preview import previewed

FAMILIES = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
    *("gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "deepseek_v2", "deepseek_v3"),
    *("olmo2", "olmoe", "stablelm", "starcoder2", "cohere", "granitemoe", "glm4_moe", "smollm3", "gpt_oss"),
    *("minimax", "mamba", "jamba", "bert", "t5", "bart", "albert", "whisper", "vit"),
]
SMALL = {
    32: "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim attn_hidden_size",
    64: "vocab_size max_position_embeddings n_positions max_source_positions max_target_positions",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_experts_per_tok eos_token_id",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts",
    8: "head_dim d_kv kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim num_mel_bins",
    16: "moe_intermediate_size q_lora_rank shared_expert_intermediate_size sliding_window",
    48: "intermediate_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_dim",
    1: "first_k_dense_replace n_group topk_group bos_token_id decoder_start_token_id",
    0: "pad_token_id",
}


def tiny(family: str) -> tuple[Any, type[Any]]:
    """A small config of the family, and the class of its model."""
    kind = CONFIG_MAPPING[family]
    sizes = {key: size for size, keys in SMALL.items() for key in keys.split()}
    default = kind()
    config = kind(**{key: size for key, size in sizes.items() if hasattr(default, key)})
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
    for auto in (getattr(transformers, name) for name in kinds):
        if kind in auto._model_mapping:
            return config, auto._model_mapping[kind]
    raise AssertionError(f"no model for {family}")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=pytest.mark.skipif(family not in CONFIG_MAPPING, reason="transformers is older"),
        )
        for family in FAMILIES
    ],
)
def test_preview_lists_what_freezing_the_built_model_freezes(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, kind = tiny(family)
    config.architectures = [kind.__name__]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    built = kind(config)
    names = [name for name, _ in built.named_parameters()]
    assert len(names) > 12
    for patterns in (["*", "!" + names[len(names) // 2]], ["*.{0,5..9}.*"], fold(names[: len(names) // 2])):
        report = frozen_opt.plan_freezing(built, patterns, role="policy")
        seen = previewed(capsys, tmp_path, *patterns)["policy"]
        assert seen["names"] == [*report.names]
        assert seen["matches"] == report.matches
        assert seen["element_count"] == report.element_count
