"""Models whose layers are mixtures of experts, as their config.json tells."""

from dataclasses import dataclass

from trinity.config.memory import experts_of, language_model, model_folder

# `model_type` of language models whose gates the trainer can replay, and how a gate weighs its experts: by the softmax
# over all experts, by that over the chosen ones, or by sigmoids.
REPLAYED = {
    "qwen3_moe": "softmax",
    "qwen3_next": "softmax",
    "qwen3_5_moe": "softmax",
    "qwen3_5_moe_text": "softmax",
    "qwen3_vl_moe": "softmax",
    "qwen3_vl_moe_text": "softmax",
    "gpt_oss": "softmax of the chosen",
    "glm4_moe": "sigmoid",
    "glm_moe_dsa": "sigmoid",
    "deepseek_v3": "sigmoid",
}

# `model_type` of language models whose experts adapters train, and those of them with experts [experts, in, out].
ADAPTED = frozenset(
    {"qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "gpt_oss", "glm4_moe", "glm_moe_dsa", "deepseek_v3"}
)
TRANSPOSED = frozenset({"gpt_oss"})


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts: `layers` of the whole model, those without experts too, and `chosen` a token."""

    layers: int
    chosen: int
    experts: int


def mixture_of(model_path: str) -> Mixture | None:
    """Returns the sizes of a model on this machine; None for others, and for models without experts."""
    config = language_model(model_folder(model_path))
    sizes = (config.get("num_hidden_layers"), config.get("num_experts_per_tok"), experts_of(config))
    return Mixture(*sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else None  # type: ignore[arg-type]


def model_type_of(model_path: str) -> str:
    """Returns the `model_type` of the language model; "" if its config.json is not on this machine."""
    return str(language_model(model_folder(model_path)).get("model_type") or "")
