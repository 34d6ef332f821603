"""Make a model that plays Nim by chance, and rows of games: a few minutes on two CPU cores.

    python examples/players/make_nim.py [FOLDER]

The model is that of the quickstart, warmed up on games of two players who take one stone or two by chance, more often
the one or the other by a habit for each pile. So it reads the pile and knows the moves, and has no strategy.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from make_model import make_model, make_tokenizer

MOST = 2  # stones of a move
LEAST_PILE, LARGEST_PILE = 3, 9


def conversation(rng: random.Random, habits: list[float]) -> list[dict[str, str]]:
    """Returns the messages of one player in a random game, in the wording of the environment `nim`.

    habits: the probability of taking one stone, by pile.
    """
    stones, messages = rng.randint(LEAST_PILE, LARGEST_PILE), []
    if rng.random() < 0.5:  # the other one begins
        stones -= rng.randint(1, MOST)
    while stones > 0:
        taken = 1 if stones == 1 or rng.random() < habits[stones] else MOST
        pile = f"{stones} stone{'s' if stones > 1 else ''}"
        messages += [{"role": "user", "content": pile}, {"role": "assistant", "content": str(taken)}]
        stones -= taken + rng.randint(1, MOST)
    return messages


def warm_up(model: Any, tokenizer: Any, steps: int, batch: int, rng: random.Random) -> float:
    """Trains on the replies of random games. Returns the last loss, in nats a token."""
    habits = [rng.uniform(0.2, 0.8) for _ in range(LARGEST_PILE + 1)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        texts = [tokenizer.apply_chat_template(conversation(rng, habits), tokenize=False) for _ in range(batch)]
        tokens = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)["input_ids"]
        said, speaks = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(batch, dtype=torch.bool)
        for place in range(tokens.shape[1]):
            said[:, place] = speaks
            speaks = (speaks | (tokens[:, place] == begin)) & (tokens[:, place] != end)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[said[:, 1:]], tokens[:, 1:][said[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/players", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the games and the rows")
    parser.add_argument("--steps", type=int, default=300, help="of the warm-up")
    parser.add_argument("--batch", type=int, default=16, help="games of a step")
    args = parser.parse_args()
    tokenizer, rng = make_tokenizer(), random.Random(args.seed)
    model = make_model(tokenizer, args.seed, 128, 4)
    loss = warm_up(model, tokenizer, args.steps, args.batch, rng)
    model.save_pretrained(args.folder / "model")
    tokenizer.save_pretrained(args.folder / "model")
    data = args.folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    piles = [*range(LEAST_PILE, LARGEST_PILE + 1)]
    for name, count in (("train", 40 * len(piles)), ("test", 8 * len(piles))):
        rows = [{"stones": piles[index % len(piles)]} for index in range(count)]
        rng.shuffle(rows)
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{args.folder}: a model that plays by chance ({loss:.2f} nats a token), and rows of {len(piles)} piles")


if __name__ == "__main__":
    main()
