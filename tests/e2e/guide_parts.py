"""Makes tiny forms of the models and data that the guides download: python -m e2e.guide_parts MODEL HOME

MODEL is the quickstart's model. HOME gets `models/` with a policy and a sequence classifier, `data/` with gsm8k and
math as parquet with prompt and answer, `sft/` with question and answer as messages, and two games of ALFWorld by name.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trinity.runtime.torch_builds import hide_unusable_companions

hide_unusable_companions()
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification  # noqa: E402

_SOLVABLE = {"pick_and_place_simple-Apple": True, "look_at-Book": False}


def sums(count: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    pairs = [(rng.randrange(50), rng.randrange(50)) for _ in range(count)]
    return [(f"{a}+{b}", str(a + b)) for a, b in pairs]


def write_classifier(folder: Path, tokenizer_folder: Path) -> None:
    """Two layers with one output, of random weights, in FsfairX-RM's form."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    config.num_labels = 1
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_parquet(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True)
    for split, count in (("train", 64), ("test", 4)):
        rows = [{"prompt": q, "answer": a} for q, a in sums(count, seed)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def main(model: Path, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    shutil.copytree(model, home / "models/Qwen2-7B-Instruct")
    write_classifier(home / "models/FsfairX-LLaMA3-RM-v0.1", model)
    write_parquet(home / "data/gsm8k", 1)
    write_parquet(home / "data/math", 2)
    (home / "sft").mkdir()
    spoken = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in sums(16, 3)]
    lines = (json.dumps({"messages": messages}) + "\n" for messages in spoken)
    (home / "sft/train.jsonl").write_text("".join(lines))
    for split in ("train", "valid_seen"):
        for name, solvable in _SOLVABLE.items():
            game = home / ".cache/alfworld/json_2.1.1" / split / name / "trial_1"
            game.mkdir(parents=True)
            (game / "game.tw-pddl").write_text(json.dumps({"solvable": solvable}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
