"""Families of models, each with a tiny random model of its architecture, and what Trinity does with it.

docs/models.md is written from here (docs/generate_models.py). The tests of this folder hold every entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity.runtime.torch_builds import hide_unusable_companions

VOCABULARY = 96
WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_WINDOWS = {
    "num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_CHUNKS = {
    "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 64, "attention_chunk_size": 16,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_TOWER = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_GRANITE = {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    text: values of the language model's config; config: of the whole, for a model with a tower. not_packed: why
    sequences are padded in place of packed; "": they are packed. engine: vLLM's CPU build samples it and loads its
    versions, or why it cannot. on_gpu: an H100 or H200 did, with vLLM 0.26 (benchmarks/gpu/families.py). adapters:
    LoRA trains it; else its files have other names than its layers.
    """

    kind: str
    models: str
    text: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    not_packed: str = ""
    windowed: bool = False
    engine: bool | str = False
    on_gpu: bool = False
    adapters: bool = True
    in_core: bool = False

    @property
    def has_tower(self) -> bool:
        return self.config is not None

    @property
    def has_experts(self) -> bool:
        return any("experts" in name for name in self.text)


FAMILIES = (
    Family("qwen3", "Qwen3", engine=True, on_gpu=True),
    Family("qwen3_moe", "Qwen3-MoE", _EXPERTS | {"decoder_sparse_step": 1}, engine=True, in_core=True,
           on_gpu=True),
    Family(
        "qwen3_next", "Qwen3-Next", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 32}, engine=True,
    ),
    Family(
        "qwen3_5", "Qwen3.5, Qwen3.6", _DELTA, {"vision_config": _QWEN_TOWER, **_QWEN_TOKENS},
        engine=True, in_core=True,
    ),
    Family(
        "qwen3_5_moe", "Qwen3.5-MoE", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 32},
        {"vision_config": _QWEN_TOWER, **_QWEN_TOKENS}, engine=True,
    ),
    Family(
        "qwen3_vl_moe", "Qwen3-VL-MoE",
        _EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
                    "norm_topk_prob": True},
        {"vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]}, **_QWEN_TOKENS},
        engine="transformers saves new experts in another layout",
    ),
    Family(
        "gemma2", "Gemma 2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
        windowed=True, engine=True, on_gpu=True,
    ),
    Family("gemma3_text", "Gemma 3 of 1B", _WINDOWS, windowed=True, engine=True, on_gpu=True),
    Family(
        "gemma3", "Gemma 3", _WINDOWS,
        {"vision_config": _TOWER, "mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91,
         "eoi_token_index": 92},
        windowed=True, engine=True, in_core=True, on_gpu=True),
    Family(
        "gemma4", "Gemma 4",
        _WINDOWS | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
                    "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0},
        {"vision_config": _TOWER}, windowed=True, engine=True,
    ),
    Family(
        "gpt_oss", "gpt-oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "num_hidden_layers": 2},
        windowed=True, engine=True, on_gpu=True,
    ),
    Family("llama4_text", "Llama 4, text only", _CHUNKS, not_packed="chunks of attention", engine=True, on_gpu=True),
    Family(
        "llama4", "Llama 4", _CHUNKS,
        {"vision_config": {**_TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
        not_packed="chunks of attention", engine=True, on_gpu=True,
    ),
    Family("mistral3", "Mistral Small 3", {"model_type": "mistral"},
           {"vision_config": {**_TOWER, "model_type": "pixtral"}, "image_token_index": 90}, engine=True),
    Family("glm4", "GLM-4", engine=True, on_gpu=True),
    Family("glm4_moe", "GLM-4.5, GLM-4.6", _ROUTED, engine=True, on_gpu=True),
    Family("glm_moe_dsa", "GLM-5", _ROUTED | _LATENT | {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 8},
           not_packed="an index chooses keys", engine="no sparse attention"),
    Family("deepseek_v3", "DeepSeek-V3", _ROUTED | _LATENT | {"n_group": 2, "topk_method": "noaux_tc"},
           engine="latent attention takes no float32"),
    Family("phi3", "Phi-3, Phi-4", engine=True, on_gpu=True),
    Family("olmo2", "OLMo 2", engine=True, on_gpu=True),
    Family("olmo3", "OLMo 3", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
           windowed=True, engine=True, on_gpu=True),
    Family("smollm3", "SmolLM3", engine=True, on_gpu=True),
    Family("granite", "Granite 3", _GRANITE, engine=True, on_gpu=True),
    Family(
        "granitemoehybrid", "Granite 4",
        _GRANITE | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "num_local_experts": 4,
                    "num_experts_per_tok": 2, "shared_intermediate_size": 32, "position_embedding_type": "rope"},
        engine=True,
    ),
    Family(
        "kimi_linear", "Kimi-Linear",
        _LATENT | {"q_lora_rank": None, "num_experts": 4, "num_experts_per_token": 2, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_shared_experts": 1,
                   "linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4,
                                          "full_attn_layers": [2], "kda_layers": [1]}},
        adapters=False, engine="no kernel without Triton",
    ),
)  # fmt: skip


def make_model(family: Family, folder: Path, sizes: Mapping[str, Any] | None = None) -> Any:
    """Saves a tiny random float32 model of the family and returns it. sizes: replace those of the declaration."""
    hide_unusable_companions()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text = {**SIZES, **family.text, **(sizes or {})}
    values = text if family.config is None else {"text_config": text, **family.config}
    config = AutoConfig.for_model(family.kind, **values)
    torch.manual_seed(0)
    kind: Any = AutoModelForCausalLM if family.config is None else AutoModelForImageTextToText
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if (weight.dim() > 1 and "norm" not in name) or name.endswith(".sinks"):
                torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    return model
