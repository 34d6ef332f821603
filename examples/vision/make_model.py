"""Make the example's model: a small Qwen2.5-VL with random weights, its tokenizer and its image processor.

    python examples/vision/make_model.py [FOLDER] [--type qwen3_vl] [--guesses]

0.6 M parameters; other types have up to 2 M, and those after Qwen3-VL need `model.images: true`. A token of an image
is 8 x 8 pixels. The tokenizer knows small letters, digits, space and a few marks, so that a random model says a digit
now and then. With --guesses it answers every question with 1, 2 or 3, drawn without a look at the image: a third is
right from the first step, and only images make it more.
"""

import argparse
import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from trinity.runtime.torch_builds import hide_unusable_companions

hide_unusable_companions()
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast  # noqa: E402

PROCESSORS = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
}
ROLES = ("system", "user", "assistant")
VISION = ("vision_start", "vision_end", "image_pad", "video_pad")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HIDDEN, PATCH, MERGE = 128, 4, 2


def make_tokenizer() -> PreTrainedTokenizerFast:
    letters = ["<|unknown|>", *string.ascii_lowercase, *string.digits, *" ?.,"]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(letters)}, "<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=[f"<|{name}|>" for name in (*ROLES, *VISION)],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, kind: str = "qwen2_5_vl") -> Any:
    torch.manual_seed(seed)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in VISION}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    tokens = {
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "tie_word_embeddings": False,
    }
    if kind == "qwen2_5_vl":
        text |= {"rope_parameters": {**rope, "mrope_section": [4, 6, 6]}}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    else:
        text |= {"head_dim": 32}
        text |= {"rope_parameters": {**rope, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 36}
    if kind.startswith("qwen3_vl"):
        text |= {"num_hidden_layers": 3}  # additions after the last layer reach no other token
        vision |= {"deepstack_visual_indexes": [0, 1]}
    if kind.startswith("qwen3_5"):
        text |= {"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
        text |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # vLLM on CPUs has no smaller ones
        text["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    if kind.endswith("_moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
        vl = {"mlp_only_layers": [0], "norm_topk_prob": True}
        text |= vl if kind == "qwen3_vl_moe" else {"shared_expert_intermediate_size": HIDDEN}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tokens)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def teach_guesses(model: Any, tokenizer: PreTrainedTokenizerFast, steps: int = 60) -> None:
    """Trains the language model to answer with a random number of squares; the placeholders have no image."""
    content = [{"type": "image"}, {"type": "text", "text": "how many?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 16)
    rows = [tokenizer(f"{text}{count}<|end|>", return_tensors="pt")["input_ids"] for count in (1, 2, 3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.cat(rows)
    for _ in range(steps):
        logits = model(input_ids=batch, use_cache=False).logits[:, -3:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, -2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def processor_files(kind: str = "qwen2_5_vl") -> dict[str, object]:
    """Returns the models' preprocessor_config.json for smaller patches."""
    least, most = (PATCH * MERGE) ** 2, 128 * 128
    size = {"min_pixels": least, "max_pixels": most}
    if kind != "qwen2_5_vl":
        size = {"size": {"shortest_edge": least, "longest_edge": most}}
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": PROCESSORS[kind],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        **size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/vision/model", type=Path)
    parser.add_argument("--type", choices=[*PROCESSORS], default="qwen2_5_vl", help="of the model")
    parser.add_argument("--guesses", action="store_true", help="teach it to answer with a number from 1 to 3")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed, args.type)
    if args.guesses:
        teach_guesses(model, tokenizer)
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    files = json.dumps(processor_files(args.type), indent=2)
    (args.folder / "preprocessor_config.json").write_text(files + "\n")
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
