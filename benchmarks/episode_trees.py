"""Compares the learning of groups whose episodes branch with that of as many whole episodes.

    python benchmarks/episode_trees.py [letters sandbox alfworld] [--seeds 2] [--folder FOLDER --runs 1]
    python benchmarks/episode_trees.py --tiny      short runs with letters: shows that it runs, measures nothing

The quickstart's model, whose tokenizer is fitted to the conversations, learns by SFT, once, to reply as a policy that
errs. From these weights it learns

- letters, an environment of four turns that announces `snapshots`: each turn shows a digit, whose letter is right, and
  the reward is the share of right replies; SFT taught letters by chance;
- sandbox, the same in a shell: the letters are commands, which show the next digit, and tests judge what was said; SFT
  taught letters of which 85 % are right;
- alfworld, small kitchens of the environment `alfworld`, which is deterministic: the model knows the plan, wastes two
  in five turns with "look", and has two turns more than the plan needs.

`grpo` plays 8 episodes of each task, `tree` plays 8 rollouts that branch before two of the replies. Tasks, their order
and seeds are equal. Shown are the success in quarters of the steps, and the tokens that were sampled for training.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from agents_learning import EXAMPLES, run
from buffer_table import Table, at_least, at_most

sys.path.insert(0, str(EXAMPLES / "quickstart"))
from make_model import make_model, make_tokenizer

from trinity.environments import ENVIRONMENTS
from trinity.explorer.workflows.player import Player
from trinity.sdk import Description, Environment, Observation, serving

DIGITS, LETTERS, TURNS = "01", "ab", 4
ROLLOUTS, TESTS = 8, 16
MOST_TOKENS, LEAST_SUCCESS = 0.6, 0.95
PLAN_TURNS = 5
Row = dict[str, Any]


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


def digits(rng: random.Random, count: int) -> list[Row]:
    drawn = ("".join(rng.choice(DIGITS) for _ in range(TURNS)) for _ in range(count))
    return [{"question": one, "digits": one} for one in drawn]


SAY = """#!/bin/sh
basename $0 >> /app/said
cut -c$(($(wc -l < /app/said) + 1)) /app/digits
"""
JUDGE = f"""
paste -sd "" /app/said | tr {LETTERS} {DIGITS} > /tmp/said
right=0
for n in $(seq {TURNS}); do [ "$(cut -c$n /tmp/said)" = "$(cut -c$n /app/digits)" ] && right=$((right + 1)); done
awk "BEGIN {{print $right / {TURNS}}}" > /logs/verifier/reward.txt
"""


def shells(rng: random.Random, count: int) -> list[Row]:
    """The letters as tasks in a shell, in Harbor's form."""
    rows = []
    for row in digits(rng, count):
        files: list[Row] = [{"path": letter, "text": SAY, "executable": True} for letter in LETTERS]
        files.append({"path": "digits", "text": row["digits"] + "\n"})
        files.append({"path": "Dockerfile", "text": "FROM debian\nCOPY . /app\nENV PATH=/app:/usr/bin:/bin\n"})
        tests = [{"path": "test.sh", "text": JUDGE}]
        rows.append({**row, "instruction": row["digits"][0], "environment": files, "tests": tests})
    return rows


def kitchens(rng: random.Random, count: int) -> list[Row]:
    """The kitchens in random order."""
    return [rng.choice(four_kitchens()) for _ in range(count)]


@cache
def four_kitchens() -> list[Row]:
    """Kitchens whose plans have `PLAN_TURNS` actions, with the plan."""
    from trinity.environments.alfworld.rooms import draw_room

    kind, found, seed = "pick_and_place_simple", [], 0
    while len(found) < 4:
        task = {"task_type": kind, "seed": seed}
        replies = cast(Any, ENVIRONMENTS["alfworld"]).oracle(task, {}, 0)
        plan = [reply.partition("<action>")[2].partition("</action>")[0] for reply in replies]
        if len(plan) == PLAN_TURNS:
            found.append({**task, "question": draw_room(kind, seed).wish, "plan": plan})
        seed += 1
    return found


@dataclass(frozen=True)
class Task:
    """`replies` yields what a policy by chance replies to a row. `played`: episodes of SFT. `shown`: characters of an
    observation. `batch`: tasks of a step. `asks`: the system prompt is the row's question. `sft_steps`: until nearly
    all replies have the form of an action; of `sft_batch` replies."""

    rows: Callable[[random.Random, int], list[Row]]
    replies: Callable[[random.Random, Row], Iterator[str]]
    kind: type[Environment]
    turns: int
    branches: list[int]
    played: int
    batch: int
    lr: float
    steps: int = 40
    sft_steps: int = 40
    sft_batch: int = 64
    args: dict[str, Any] = field(default_factory=dict)
    shown: int = 40
    reply_tokens: int = 4
    length: int = 64
    asks: bool = False


def letters(rng: random.Random, row: Row) -> Iterator[str]:
    while True:
        yield rng.choice(LETTERS)


def commands(rng: random.Random, row: Row) -> Iterator[str]:
    for digit in row["digits"]:
        wrong = rng.random() < 0.15
        yield f"```{LETTERS[int(digit) ^ wrong]}```"


def plans(rng: random.Random, row: Row) -> Iterator[str]:
    for reply in row["plan"]:
        while rng.random() < 0.4:
            yield "look"
        yield reply


TASKS = {
    "letters": Task(digits, letters, Letters, TURNS, [2, 3], 160, 16, 3e-4),
    "sandbox": Task(
        shells, commands, ENVIRONMENTS["sandbox"], TURNS, [2, 3], 96, 4, 5e-4, steps=20, sft_steps=300, sft_batch=16,
        args={"max_steps": TURNS}, reply_tokens=8, length=192
    ),
    "alfworld": Task(
        kitchens, plans, ENVIRONMENTS["alfworld"], PLAN_TURNS + 2, [3, 4], 48, 4, 5e-4, steps=40, sft_steps=280,
        sft_batch=16, reply_tokens=12, length=384, asks=True,
        args={"max_steps": PLAN_TURNS + 2, "max_repeats": 0, "list_actions": False, "reply_format": "plain"},
    ),
}  # fmt: skip


def make_data(folder: Path, task: Task, args: argparse.Namespace) -> list[Row]:
    """Tasks for training and evaluation, and conversations of SFT: each up to one of its replies. Returns these."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = task.rows(rng, args.steps * args.batch + TESTS)
    spoken = [part for row in task.rows(rng, args.played) for part in conversations(task, row, rng)]
    for name, rows in {"sft": spoken, "train": tasks[TESTS:], "test": tasks[:TESTS]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return spoken


def make_model_of(folder: Path, rows: Sequence[Row]) -> None:
    """The quickstart's model with random weights, whose tokens are the words of the conversations."""
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer = make_tokenizer().train_new_from_iterator(texts, 512, show_progress=False)
    make_model(tokenizer, 0, 128, 4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def conversations(task: Task, row: Row, rng: random.Random) -> Iterator[Row]:
    cut = SimpleNamespace(rules=SimpleNamespace(max_observation_characters=task.shown))
    messages = [{"role": "system", "content": row["question"]}] if task.asks else []
    with closing(task.kind()) as game:
        answer = game.reset(row, task.args, 0)
        text = answer.text.removeprefix(str(answer.info.get("instructions") or "")).lstrip("\n")
        for reply in task.replies(rng, row):
            messages.append({"role": "user", "content": Player.cut(cast(Player, cut), text)})
            messages.append({"role": "assistant", "content": reply})
            yield {"messages": [*messages]}
            if (answer := game.step(reply)).done:
                return
            text = answer.text


def measure(folder: Path, task: Task, address: str, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """For each algorithm and seed: success in quarters of the steps, greedy success at the end, tokens sampled.

    address: where the environment is served; empty for a built-in one.
    """
    name = folder.name
    if not (folder / "model").exists():
        make_model_of(folder / "model", make_data(folder / "data", task, args))
    told = yaml.safe_load((EXAMPLES / "quickstart/arithmetic.yaml").read_text())
    sft, _ = told.pop("stages")
    del sft["stage_name"]
    told.update(project=name, model={"max_model_len": task.length, "max_response_tokens": task.reply_tokens})
    begun = {**told, **sft, "name": "sft"}
    begun["model"] = {**told["model"], "model_path": str(folder / "model")}
    begun["buffer"].update(total_steps=args.sft_steps, train_batch_size=task.sft_batch)
    begun["buffer"]["trainer_input"]["experience_buffer"].update(
        split="sft", format={"prompt_type": "messages", "messages_key": "messages"}
    )
    run(folder, begun, folder, args)
    told["model"]["model_path"] = str(folder / f"jobs/{name}/sft/global_step_{args.sft_steps}/actor/huggingface")
    kinds = {"grpo": {}, "tree": {"branches": {"turns": task.branches, "width": 2}}}
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for seed in range(args.seeds):
        for kind in list(kinds)[:: -1 if seed % 2 else 1]:
            found[kind].append(learn(folder, told, task, kind, kinds[kind], seed, address, args))
    return found


def learn(
    folder: Path,
    told: dict[str, Any],
    task: Task,
    kind: str,
    branches: dict[str, Any],
    seed: int,
    address: str,
    args: argparse.Namespace,
) -> list[float]:
    config = json.loads(json.dumps(told))
    config["name"] = f"{kind}-{seed}"
    config["algorithm"].update(algorithm_type=kind, repeat_times=ROLLOUTS)
    config["algorithm"]["optimizer"]["lr"] = args.lr
    config["buffer"].update(total_steps=args.steps, batch_size=args.batch)
    config["explorer"].update(
        eval_interval=args.steps, eval_on_startup=False, rollout_model={"seed": seed}, durable_episodes=False
    )
    if address:
        config["explorer"]["environments"] = [{"name": folder.name, "address": address}]
    config["trainer"]["shared_prompts"] = True
    given = config["buffer"]["explorer_input"]
    given["eval_tasksets"][0]["name"] = "test"
    for taskset in (given["taskset"], *given["eval_tasksets"]):
        form = {"prompt_key": "question", "response_key": "question"}
        form |= {"system_prompt_key": "question"} if task.asks else {}
        taskset.update(default_workflow_type="environment_workflow", format=form)
        taskset["workflow_args"] = {
            "environment": folder.name,
            "environment_args": task.args,
            "max_turns": task.turns,
            "max_observation_characters": task.shown,
            "system_prompt": "",
            **branches,
        }
        taskset.pop("default_reward_fn_type")
    run(folder, config, folder, args)
    rows = [
        json.loads(line) for line in (folder / f"jobs/{folder.name}/{config['name']}/monitor/explorer.jsonl").open()
    ]
    steps = [row for row in rows if "rollout/reward/mean" in row]
    tokens = [row["rollout/response_tokens/mean"] - row.get("rollout/shared_tokens/mean", 0.0) for row in steps]
    success = [row["rollout/success/mean"] for row in steps]
    size = -(-len(success) // 4)
    quarters = [statistics.mean(success[at : at + size]) for at in range(0, len(success), size)]
    greedy = [row[key] for row in rows if (key := "eval/test/success/mean@1") in row]
    found = [*quarters, greedy[-1], sum(tokens) * args.batch * ROLLOUTS]
    print(folder.name, config["name"], " ".join(f"{value:.2f}" for value in found), flush=True)
    return found


def show(name: str, found: dict[str, list[list[float]]], args: argparse.Namespace) -> bool:
    """Prints the runs, and what trees reach of whole episodes. Returns True if the limits are kept."""
    quarters = len(found["grpo"][0]) - 2
    table = Table(
        f"{name}: {args.steps} steps of {args.batch} tasks, {args.seeds} seeds",
        ("algorithm", "seed", *(f"quarter {n + 1}" for n in range(quarters)), "greedy, end", "sampled tokens"),
    )
    for kind, runs in found.items():
        for seed, (*success, tokens) in enumerate(runs):
            table.rows.append((kind, str(seed), *(f"{value:.3f}" for value in success), f"{tokens:,.0f}"))
    table.show()
    late, tokens = (
        [statistics.mean(one[at] for one in found[kind]) for kind in ("tree", "grpo")] for at in (quarters - 1, -1)
    )
    kept, share = late[0] / max(late[1], 1e-9), tokens[0] / tokens[1]
    print(f"tree: {kept:.2f} of the success of grpo in the last quarter (limit {at_least(kept, LEAST_SUCCESS)})")
    print(f"tree: {share:.2f} of the sampled tokens of grpo (limit {at_most(share, MOST_TOKENS)})")
    return kept >= LEAST_SUCCESS and share <= MOST_TOKENS


async def with_letters(folder: Path, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    async with serving(Letters, address="127.0.0.1:0") as address:
        return await asyncio.to_thread(measure, folder, TASKS["letters"], address, args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; else letters and sandbox")
    for name, value in {"sft-steps": 0, "steps": 0, "batch": 0, "seeds": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=0.0, help="0: the task's")
    parser.add_argument("--folder", type=Path, help="of the runs, which stay there: a second call does what is left")
    parser.add_argument("--runs", type=int, default=1000, help="the most runs of this call; SFT is one of them")
    parser.add_argument("--tiny", action="store_true", help="a few steps")
    if "--tiny" in sys.argv:
        parser.set_defaults(sft_steps=2, steps=4, batch=2, seeds=1)
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"unknown task: {', '.join(unknown)}; choose from {', '.join(TASKS)}")
    good = True
    names = args.tasks or (["letters"] if args.tiny else ["letters", "sandbox"])
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory(prefix="trinity-bench-") as place:
        for name in names:
            task, folder = TASKS[name], Path(place).resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            now = argparse.Namespace(**vars(args))
            now.steps, now.batch = args.steps or task.steps, args.batch or task.batch
            now.sft_steps = args.sft_steps or task.sft_steps
            now.lr, now.played = args.lr or task.lr, 2 if args.tiny else task.played
            built_in = name in ENVIRONMENTS
            found = measure(folder, task, "", now) if built_in else asyncio.run(with_letters(folder, now))
            good &= show(name, found, now)
            args.runs = now.runs
    return 0 if good or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
