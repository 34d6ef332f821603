"""Make the quickstart's model: a small Qwen2 with random weights and a byte tokenizer, in a few seconds.

    python examples/quickstart/make_model.py [FOLDER] [--family qwen3_5]

Qwen2 architecture, 0.9 M parameters, embeddings not tied to the output. Other families, by their `model_type`: Qwen3.5
(gated delta networks) and Gemma 3 (windows, tied embeddings) with towers for images, and a Qwen3 of experts.
The tokenizer knows every byte, so any text can be asked, and has one special token for each role, so that the chat
template costs three tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trinity.runtime.torch_builds import hide_unusable_companions

hide_unusable_companions()
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Values of the language model's config that the family adds, and those of the whole for a model with a tower.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "qwen2": ({}, None),
    "qwen3_moe": ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}, None),
    "qwen3_5": (
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,  # vLLM's kernel for CPUs knows 64 and 128
            "linear_value_head_dim": 64,
        },
        {"vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
                           "out_hidden_size": 128}},
    ),
    "gemma3": (
        {
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "tie_word_embeddings": True,
        },
        {"vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
         "mm_tokens_per_image": 4,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int, layers: int, family: str = "qwen2") -> Any:
    torch.manual_seed(seed)
    given, config = FAMILIES[family]
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **given,
    }
    if config is None:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **text))
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, text_config=text, **config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/quickstart/model", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen2", help="architecture, as transformers names it")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="depth of the model")
    parser.add_argument(
        "--last-norm", type=float, default=1.0,
        help="scale of a Qwen2's norm before the output projection; with 10 adapters can be sure of a token although "
        "that projection is random",
    )  # fmt: skip
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed, args.hidden, args.layers, args.family)
    if args.last_norm != 1:
        model.model.norm.weight.data *= args.last_norm
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
