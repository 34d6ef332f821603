"""A model that knows some sums already, as the quickstart's SFT stage makes it, without a run."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_STEPS, _ROWS, _RATE, _WARM_UP = 200, 64, 2e-3, 20
_IGNORED = -100


def warm_up(model_folder: Path, rows_file: Path, target: Path) -> None:
    """Train the model on worked sums, and save it with its tokenizer."""
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModelForCausalLM.from_pretrained(model_folder)
    rows = [_tokens(tokenizer, json.loads(line)) for line in rows_file.read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP)
        chosen = [rows[index] for index in torch.randint(len(rows), (_ROWS,)).tolist()]
        longest = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in chosen])
        labels = torch.tensor([labels + [_IGNORED] * (longest - len(labels)) for _, labels in chosen])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _tokens(tokenizer: object, row: dict[str, str]) -> tuple[list[int], list[int]]:
    """Ids of prompt and answer, and labels of only the answer. Padding comes last, so attention may ignore it."""
    encode = tokenizer.apply_chat_template  # type: ignore[attr-defined]
    question = [{"role": "user", "content": row["question"]}]
    answer = [*question, {"role": "assistant", "content": row["answer"]}]
    prompt = encode(question, tokenize=True, add_generation_prompt=True, return_dict=False)
    whole = encode(answer, tokenize=True, return_dict=False)
    return whole, [_IGNORED] * len(prompt) + whole[len(prompt) :]
