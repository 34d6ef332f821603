"""Write examples/algorithms/<algorithm_type>.yaml, one for every algorithm, and the data that some of them need.

    python examples/algorithms/make.py [--data FOLDER]

All are one template on the quickstart's tiny model and sums, so that they differ in what the algorithms differ in. A
test compares the files with what this writes. --data writes the rows of `cpt`, `dpo` and of a teacher too.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import yaml

from trinity.config.algorithms import ALGORITHMS

FOLDER = Path(__file__).parent
DATA = "${oc.env:TRINITY_TASKSET_PATH,build/quickstart/data}"
MODEL = "${oc.env:TRINITY_MODEL_PATH,build/quickstart/model}"
TEACHER = "${oc.env:TRINITY_TEACHER_PATH,build/quickstart/model}"
GROUPS, GROUP, ROWS = 16, 8, 64
SUMS = {"prompt_key": "question", "response_key": "answer"}

OPERATORS: dict[str, list[dict[str, Any]]] = {
    "raft": [{"name": "raft_filter", "args": {"k": 2}}],
    "dapo": [
        {"name": "dapo_dynamic_sampling_filter"},
        {"name": "mask_response_truncated"},
        {"name": "overlong_reward_shaping", "args": {"max_response_length": 32, "cache_length": 6}},
    ],
}

WORDS = {
    "dapo": "# Tasks whose rollouts are all right or all wrong are replaced: begin with a model that solves some.",
    "dpo": "# Learns from preference pairs: rows of a prompt, a chosen and a rejected reply, by make.py --data.",
    "cpt": "# Learns from plain text, every token of it: rows by make.py --data.",
    "sft": "# Learns from worked answers.",
    "on_policy_distill": "# TRINITY_TEACHER_PATH names the teacher: a model with the same tokenizer.",
    "jsd": "# TRINITY_TEACHER_PATH names the teacher: a model with the same tokenizer.",
    "remax": "# The last rollout of each task is greedy, as the baseline of the others; it is not trained.",
    "gigpo": "# Meant for episodes of several steps; here each has one.",
    "multi_step_grpo": "# Meant for episodes of several steps; here each has one.",
}


def config(name: str) -> dict[str, Any]:
    """The YAML of one algorithm."""
    algorithm = ALGORITHMS[name]
    offline = algorithm.offline or name == "dpo"
    document: dict[str, Any] = {
        "project": "algorithms",
        "name": name,
        "checkpoint_root_dir": "${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}",
        **({"mode": "train"} if offline else {}),
        "model": {"model_path": MODEL, "max_prompt_tokens": 32, "max_response_tokens": 32},
        "algorithm": _algorithm(name, offline),
        "buffer": _dataset(name) if offline else _tasks(name),
    }
    if not offline:
        document["explorer"] = {"runner_per_model": 32, "max_timeout": 120}
        document["synchronizer"] = {"sync_interval": 1, "sync_offset": 1}
    if name in ("on_policy_distill", "jsd"):
        document["explorer"]["auxiliary_models"] = [{"name": "teacher", "model_path": TEACHER}]
    if name in OPERATORS:
        document["data_processor"] = {"experience_pipeline": {"operators": OPERATORS[name]}}
    document["trainer"] = {
        "max_checkpoints_to_keep": 1,
        "gradient_checkpointing": False,
        "max_token_len_per_gpu": 8192,
        **({"critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 2}} if algorithm.critic else {}),
    }
    return document


def _algorithm(name: str, offline: bool) -> dict[str, Any]:
    rate = {"dpo": 1e-4, "opmd": 1e-4}.get(name, 2e-3 if offline else 3e-4)
    chosen: dict[str, Any] = {"algorithm_type": name, "optimizer": {"lr": rate}}
    if not offline:
        chosen["repeat_times"] = GROUP
    if ALGORITHMS[name].sample_strategy == "mix":
        chosen["sample_strategy_args"] = {"expert_data_ratio": 0.2, "sft_dataset_name": "worked_sums"}
    return chosen


def _dataset(name: str) -> dict[str, Any]:
    """What offline algorithms learn from."""
    forms: dict[str, tuple[str, dict[str, Any]]] = {
        "dpo": ("pairs", {"prompt_key": "question"}),
        "cpt": ("texts", {"prompt_type": "plaintext", "prompt_key": "text"}),
        "sft": ("train", {"prompt_type": "plaintext", **SUMS}),
    }
    split, form = forms[name]
    source = {
        "name": "rows",
        "storage_type": "file",
        "path": DATA,
        "split": split,
        "format": form,
        "data_selector": {"selector_type": "shuffle"},
    }
    return {"train_batch_size": ROWS, "total_steps": 60, "trainer_input": {"experience_buffer": source}}


def _tasks(name: str) -> dict[str, Any]:
    distills = name in ("on_policy_distill", "jsd")
    taskset = {
        "name": "sums",
        "path": DATA,
        "split": "train",
        "format": SUMS,
        "default_workflow_type": "on_policy_distill_workflow" if distills else "simple_workflow",
        "default_reward_fn_type": "accuracy_reward",
        "data_selector": {"selector_type": "shuffle", "seed": 1},
    }
    tasks: dict[str, Any] = {
        "batch_size": GROUPS,
        "total_steps": 60,
        "explorer_input": {"taskset": taskset},
    }
    if ALGORITHMS[name].sample_strategy == "mix":
        tasks["train_batch_size"] = GROUPS * GROUP * 5 // 4  # one in five is an expert's
        form = {"prompt_type": "plaintext", **SUMS}
        expert = {"storage_type": "file", "path": DATA, "split": "train", "format": form}
        tasks["trainer_input"] = {"auxiliary_buffers": {"worked_sums": expert}}
    return tasks


def text(name: str) -> str:
    """The whole file."""
    head = f"# {name} on the quickstart's sums. Written by make.py; docs/algorithms.md has the formulas.\n"
    words = f"{WORDS[name]}\n" if name in WORDS else ""
    return head + words + yaml.safe_dump(config(name), sort_keys=False, width=120)


def write_data(folder: Path, seed: int = 0) -> None:
    """pairs.jsonl, texts.jsonl and teacher.jsonl beside the quickstart's train.jsonl.

    The right answer is preferred to a wrong one; the teacher's answers all show their work.
    """
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    random_number = random.Random(seed)
    pairs, texts = [], []
    for row in rows:
        right = int(row["answer"].rpartition("#### ")[2])
        wrong = right + random_number.choice([-10, -1, 1, 10])
        rejected = row["answer"].replace(f"#### {right}", f"#### {wrong}")
        pairs.append({"question": row["question"], "chosen": row["answer"], "rejected": rejected})
        texts.append({"text": f"{row['question']}\n{row['answer']}"})
    worked = [row for row in rows if "=" in row["answer"].partition(",")[2]]
    for name, made in (("pairs", pairs), ("texts", texts), ("teacher", worked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the quickstart's data, which gets more rows")
    args = parser.parse_args()
    if args.data is not None:
        write_data(args.data)
    for name in ALGORITHMS:
        (FOLDER / f"{name}.yaml").write_text(text(name))
    print(f"{len(ALGORITHMS)} files in {FOLDER}")


if __name__ == "__main__":
    main()
