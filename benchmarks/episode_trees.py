"""Compares the learning of groups whose episodes branch with that of as many whole episodes.

    python benchmarks/episode_trees.py [--steps 40 --seeds 2] [--folder FOLDER --runs 1]
    python benchmarks/episode_trees.py --tiny      three short runs: shows that it runs, measures nothing

The quickstart's model learns by SFT, once, to reply one of two letters. From these weights it learns an environment of
four turns that announces `snapshots`: each turn shows a digit, whose letter is right, and the reward is the share of
right replies. `grpo` plays 8 episodes of each task, `tree` plays 8 rollouts that branch before the third and the fourth
reply. Tasks, their order and seeds are equal. Shown are the success, where all four replies must be right,
and the tokens that were sampled for training.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from agents_learning import EXAMPLES, python, run
from buffer_table import Table, at_least, at_most

from trinity.sdk import Description, Environment, Observation, serving

DIGITS, LETTERS, TURNS = "01", "ab", 4
KINDS: dict[str, dict[str, Any]] = {"grpo": {}, "tree": {"branches": {"turns": [2, 3], "width": 2}}}
MOST_TOKENS, LEAST_SUCCESS = 0.6, 0.95


class Letters(Environment):
    """`number` counts the replies so far, `right` the right ones."""

    description = Description("letters", "Letters of digits.", 512, step_timeout_seconds=10, snapshots=True)
    isolation = "none"

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.digits, self.number, self.right = str(task["digits"]), 0, 0
        return Observation(self.digits[0])

    def step(self, action: str) -> Observation:
        wanted = LETTERS[int(self.digits[self.number])]
        good = action.strip() == wanted
        self.number, self.right = self.number + 1, self.right + good
        done = self.number == TURNS
        metrics = {"success": float(self.right == TURNS)}
        return Observation("" if done else self.digits[self.number], good / TURNS, done, metrics=metrics)

    def snapshot(self) -> bytes:
        return json.dumps([self.digits, self.number, self.right]).encode()

    def restore(self, state: bytes) -> None:
        self.digits, self.number, self.right = json.loads(state)


def make_data(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    sft = [{"digits": d, "letter": rng.choice(LETTERS)} for d in DIGITS for _ in range(320)]
    tasks = [{"digits": "".join(rng.choice(DIGITS) for _ in range(TURNS))} for _ in range(1024 + 64)]
    for name, rows in {"sft": sft, "train": tasks[64:], "test": tasks[:64]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path, address: str, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """For each kind and seed: success and reward in the last quarter of the steps, greedy success, tokens sampled."""
    python(EXAMPLES / "quickstart/make_model.py", folder / "model")
    make_data(folder / "data")
    told = yaml.safe_load((EXAMPLES / "quickstart/arithmetic.yaml").read_text())
    sft, _ = told.pop("stages")
    del sft["stage_name"]
    told["project"] = "trees"
    begun = {**told, **sft, "name": "sft"}
    begun["model"] = {**told["model"], "model_path": str(folder / "model")}
    begun["buffer"].update(total_steps=args.sft_steps, train_batch_size=64)
    begun["buffer"]["trainer_input"]["experience_buffer"].update(
        split="sft", format={"prompt_type": "plaintext", "prompt_key": "digits", "response_key": "letter"}
    )
    run(folder, begun, folder, args)
    weights = folder / f"jobs/trees/sft/global_step_{args.sft_steps}/actor/huggingface"
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for seed in range(args.seeds):
        for kind in list(KINDS)[:: -1 if seed % 2 else 1]:
            found[kind].append(learn(folder, told, weights, kind, seed, address, args))
    return found


def learn(
    folder: Path, told: dict[str, Any], weights: Path, kind: str, seed: int, address: str, args: argparse.Namespace
) -> list[float]:
    config = json.loads(json.dumps(told))
    config["name"] = f"{kind}-{seed}"
    config["model"] = {"model_path": str(weights), "max_model_len": 64, "max_response_tokens": 4}
    config["algorithm"].update(algorithm_type=kind, repeat_times=8)
    config["algorithm"]["optimizer"]["lr"] = args.lr
    config["buffer"].update(total_steps=args.steps, batch_size=args.batch)
    config["explorer"].update(eval_interval=max(1, args.steps // 3), rollout_model={"seed": seed})
    config["explorer"]["environments"] = [{"name": "letters", "address": address}]
    config["trainer"]["shared_prompts"] = True
    given = config["buffer"]["explorer_input"]
    given["eval_tasksets"][0]["name"] = "letters-test"
    for taskset in (given["taskset"], *given["eval_tasksets"]):
        taskset.update(default_workflow_type="environment_workflow", format={"prompt_key": "digits"})
        taskset["workflow_args"] = {"environment": "letters", "max_turns": TURNS, **KINDS[kind]}
        taskset.pop("default_reward_fn_type")
    run(folder, config, folder, args)
    rows = [json.loads(line) for line in (folder / f"jobs/trees/{config['name']}/monitor/explorer.jsonl").open()]
    steps = [row for row in rows if "rollout/reward/mean" in row]
    of_step = [row["rollout/response_tokens/mean"] - row.get("rollout/shared_tokens/mean", 0.0) for row in steps]
    late = steps[-(len(steps) // 4 or 1) :]
    success, reward = (statistics.mean(row[f"rollout/{name}/mean"] for row in late) for name in ("success", "reward"))
    greedy = [row[key] for row in rows if (key := "eval/letters-test/success/mean@1") in row]
    found = [success, reward, greedy[-1], sum(of_step) * args.batch * 8]
    print(config["name"], " ".join(f"{row['rollout/success/mean']:.2f}" for row in steps), flush=True)
    return found


def show(found: dict[str, list[list[float]]], args: argparse.Namespace) -> None:
    table = Table(
        f"{args.steps} steps of {args.batch} tasks, {args.seeds} seeds",
        ("algorithm", "success, last quarter", "reward", "greedy success, end", "sampled tokens", "of grpo", "limits"),
    )
    means = {kind: [statistics.mean(values) for values in zip(*runs, strict=True)] for kind, runs in found.items()}
    whole = means["grpo"]
    for kind, (success, reward, greedy, tokens) in means.items():
        shares = success / max(whole[0], 1e-9), tokens / whole[-1]
        share, kept = (
            "{:.2f}, {:.2f}".format(*shares),
            (at_least(shares[0], LEAST_SUCCESS), at_most(shares[1], MOST_TOKENS)),
        )
        limits = ", ".join(kept) if kind == "tree" else ""
        figures = f"{success:.3f}", f"{reward:.3f}", f"{greedy:.3f}", f"{tokens:,.0f}"
        table.rows.append((kind, *figures, share, limits))
    table.show()


async def with_environment(folder: Path, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    async with serving(Letters, address="127.0.0.1:0") as address:
        return await asyncio.to_thread(measure, folder, address, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"sft-steps": 40, "steps": 40, "batch": 16, "seeds": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--folder", type=Path, help="of the runs, which stay there: a second call does what is left")
    parser.add_argument("--runs", type=int, default=1000, help="the most runs of this call; SFT is one of them")
    parser.add_argument("--tiny", action="store_true", help="a few steps")
    if "--tiny" in sys.argv:
        parser.set_defaults(sft_steps=2, steps=3, batch=2, seeds=1)
    args = parser.parse_args()
    if args.folder:
        found = asyncio.run(with_environment(args.folder.resolve(), args))
    else:
        with tempfile.TemporaryDirectory(prefix="trinity-bench-") as folder:
            found = asyncio.run(with_environment(Path(folder), args))
    show(found, args)


if __name__ == "__main__":
    main()
