"""A small system for benchmarks/faults that loses, doubles and invents on purpose; with no flaw it does none of it.

It trains each row once with torch, in order, saves its weights every few steps, and resumes from them. Its
responses are random tokens, sampled as if by the weights that it has. It journals each turn of an episode of several,
and continues a killed episode at its open turn.
"""

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import probe
from audit import Work
from grader import GraderUnavailable, grade
from tool import Tool

probe.install()

FLAWS = ("none", "skips", "repeats", "drops", "fakes", "rewinds", "stale", "changes", "trains_nan")
TURN_FLAWS = ("forgets", "acts", "mixes")


def played(journal: Path, flaw: str, row: int, turns: int, work: Work, sampler: int) -> str:
    """Plays an episode from what its journal has of it, and returns all that was said in it."""
    said = json.loads(journal.read_text()) if journal.exists() and flaw != "forgets" else []
    before, tool = len(said), Tool(row, turns, said)
    if flaw == "acts":
        tool = Tool(row, turns)
        for reply in said[::2]:
            tool.step(reply)
    while len(tool.said) < 2 * turns - 1:
        chance = random.Random(f"{journal.name} {len(tool.said)}")
        reply = "".join(chr(100 + chance.randrange(26)) for _ in range(6))
        context = "".join([*tool.said, reply])
        probe.record("sample", ids=[*work.prompts[row], *map(ord, context), 0], bits=sampler)
        tool.step(reply)
        journal.with_suffix(".new").write_text(json.dumps(tool.said))
        journal.with_suffix(".new").rename(journal)
        time.sleep(0.05)  # for faults to strike
    if flaw == "mixes" and before:
        return "".join(["of another attempt", *tool.said[1:]])
    return "".join(tool.said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flaw", choices=FLAWS + TURN_FLAWS, required=True)
    parser.add_argument("--prompts", type=json.loads, required=True)
    for name in ("group", "tasks", "save-every", "turns"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    work = Work([tuple(prompt) for prompt in args.prompts], args.group, args.tasks, frozenset({0}))

    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(200, 8), nn.Linear(8, 200))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved, begin = args.folder / "disk/saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        begin = state["step"] + {"skips": 1, "repeats": -1}.get(args.flaw, 0)
        if args.flaw != "rewinds":  # the weights begin again, as if the checkpoint were another run's
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            nn.init.ones_(model[1].bias)
    first = probe.bits(model.parameters())
    for step in range(begin, work.steps):
        sequences, rewards = [], []
        sampler = first if args.flaw == "stale" and step > work.steps // 2 else probe.bits(model.parameters())
        for row in range(step * work.tasks, (step + 1) * work.tasks):
            for number in range(work.group):
                if args.turns > 1:
                    said = played(args.folder / f"{row}-{number}.json", args.flaw, row, args.turns, work, sampler)
                    sequences.append([*work.prompts[row], *map(ord, said), 0])
                    continue
                chance = random.Random(f"{row} {number} {os.getpid() if args.flaw == 'changes' else ''}")
                response = [100 + chance.randrange(90) for _ in range(6)]
                probe.record("sample", ids=[*work.prompts[row], *response, 0], bits=sampler)
                reward = 0.0
                try:
                    reward = grade(row, "12ab", response)
                except GraderUnavailable:
                    if args.flaw == "drops":
                        continue
                    if args.flaw != "fakes":
                        reward = grade(row, "12ab", response)
                if math.isnan(reward) and args.flaw != "trains_nan":
                    reward = grade(row, "12ab", response)
                rewards.append(reward)
                sequences.append([*work.prompts[row], *response, 0])
        length = max(map(len, sequences))
        ids = torch.tensor([[0] * (length - len(sequence)) + sequence for sequence in sequences])
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        (loss * (1 + sum(rewards) / max(len(rewards), 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.5)  # for faults to strike
        if (step + 1) % args.save_every == 0:
            values = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(values, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)


if __name__ == "__main__":
    main()
