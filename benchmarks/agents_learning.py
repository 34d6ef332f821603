"""Compares the learning of an agent on OpenAI's SDK with the built-in workflow that has the same tool.

    python benchmarks/agents_learning.py [--steps 30 --seeds 2] [--folder FOLDER --runs 1]

The quickstart's model learns to call a tool by SFT, once, on sums of two numbers below `--limit`. From these weights
GRPO runs with `sums_agent` of examples/agents, by the recording gateway, and with `tool_call_workflow`, whose tool is
the same function. Prompts, tasks and their order are equal, so the rewards of each step may be compared. Both run with
every sampling seed, in turns. The difference between two seeds of one workflow is noise.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"
WORKFLOWS = {"sums_agent": {}, "tool_call_workflow": {"tools": ["add"], "max_turns": 3}}
# The agent's own function, as a tool of the built-in workflow.
TOOL = """
import json
import sums_agent
from trinity.plugins import tool

NUMBER = {"type": "integer", "description": "A number."}


@tool("add", "The sum of two numbers.", {"a": NUMBER, "b": NUMBER})
def add(**arguments):
    return sums_agent.add(json.dumps(arguments))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"limit": 10, "sft-steps": 300, "sft-batch": 64, "steps": 30, "batch": 16, "seeds": 2}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--weights", type=Path, help="that SFT begins with; else the quickstart's model")
    parser.add_argument("--folder", type=Path, help="of the runs, which stay there: a second call does what is left")
    parser.add_argument("--runs", type=int, default=1000, help="the most runs of this call; SFT is one of them")
    args = parser.parse_args()
    if args.folder:
        curves = measure(args.folder.resolve(), args)
    else:
        with tempfile.TemporaryDirectory(prefix="trinity-bench-") as folder:
            curves = measure(Path(folder), args)
    table(curves)
    return 0


def measure(folder: Path, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """For each workflow and seed: accuracy before, rewards of all steps, accuracy after."""
    python(EXAMPLES / "quickstart/make_model.py", folder / "model")
    test = ["--test-size", min(128, args.limit**2 // 5)]
    python(EXAMPLES / "quickstart/make_data.py", folder / "sums", "--limit", args.limit, *test)
    python(EXAMPLES / "agents/make_data.py", folder / "data", "--from", folder / "sums")
    plugins = folder / "plugins"
    plugins.mkdir(exist_ok=True)
    for file in ("sums_agent.py", "sums_workflow.py"):
        (plugins / file).write_text((EXAMPLES / "agents/plugins" / file).read_text())
    (plugins / "add_tool.py").write_text(TOOL)
    told = yaml.safe_load((EXAMPLES / "agents/sums.yaml").read_text())
    sft, _ = told.pop("stages")
    del sft["stage_name"]
    begun = {**told, **sft, "name": "sft"}
    begun["model"] = {**told["model"], "model_path": str(args.weights or folder / "model")}
    begun["buffer"].update(total_steps=args.sft_steps, train_batch_size=args.sft_batch)
    run(folder, begun, plugins, args)
    weights = folder / f"jobs/agents/sft/global_step_{args.sft_steps}/actor/huggingface"
    curves: dict[str, list[list[float]]] = {name: [] for name in WORKFLOWS}
    for seed in range(args.seeds):
        for workflow in list(WORKFLOWS)[:: -1 if seed % 2 else 1]:
            curves[workflow].append(curve(folder, told, plugins, weights, workflow, seed, args))
    return curves


def curve(
    folder: Path, told: dict[str, Any], plugins: Path, weights: Path, workflow: str, seed: int, args: argparse.Namespace
) -> list[float]:
    config = json.loads(json.dumps(told))
    config["name"] = f"{workflow}-{seed}"
    config["model"]["model_path"] = str(weights)
    config["buffer"].update(total_steps=args.steps, batch_size=args.batch)
    config["explorer"].update(eval_interval=args.steps, rollout_model={"seed": seed})
    given = config["buffer"]["explorer_input"]
    for taskset in (given["taskset"], *given["eval_tasksets"]):
        taskset.update(default_workflow_type=workflow, workflow_args=WORKFLOWS[workflow])
    run(folder, config, plugins, args)
    rows = [json.loads(line) for line in (folder / f"jobs/agents/{config['name']}/monitor/explorer.jsonl").open()]
    rewards = [row["rollout/reward/mean"] for row in rows if "rollout/reward/mean" in row]
    before, *_, after = [row[key] for row in rows if (key := "eval/sums-test/accuracy/mean@1") in row]
    found = [before, *rewards, after]
    print(config["name"], " ".join(f"{value:.3f}" for value in found), flush=True)
    return found


def run(folder: Path, config: dict[str, Any], plugins: Path, args: argparse.Namespace) -> None:
    """Play the run unless an earlier call did. Ends the script if this call may play no further run."""
    finished = folder / f"{config['name']}.finished"
    if finished.exists():
        return
    if args.runs < 1:
        sys.exit(f"{config['name']} and what follows is left for another call")
    args.runs -= 1
    path = folder / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    places = {"TRINITY_CHECKPOINT_ROOT_DIR": folder / "jobs", "TRINITY_TASKSET_PATH": folder / "data"}
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}}
    command = [sys.executable, "-m", "trinity.cli.main", "run", "--config", path, "--plugin-dir", plugins]
    with (folder / f"{config['name']}.out").open("w") as out:
        done = subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
    if done.returncode:
        sys.exit((folder / f"{config['name']}.out").read_text()[-5000:])
    finished.touch()


def python(*arguments: Any) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def table(curves: dict[str, list[list[float]]]) -> None:
    """Means over seeds for quarters of the steps, and the mean differences between seeds and between workflows."""
    means = {}
    for workflow, found in curves.items():
        steps = [statistics.mean(at) for at in zip(*found, strict=True)]
        before, rewards, after = steps[0], steps[1:-1], steps[-1]
        means[workflow] = [statistics.mean(one[1:-1]) for one in found]
        size = max(1, len(rewards) // 4)
        quarters = [statistics.mean(rewards[at : at + size]) for at in range(0, size * 4, size) if rewards[at:]]
        told = " ".join(f"{value:.3f}" for value in quarters)
        print(f"{workflow:20} accuracy {before:.3f} to {after:.3f}, rewards by quarters {told}")
    agent, built_in = means.values()
    noise = max(max(each) - min(each) for each in (agent, built_in))
    print(f"mean reward: agent {agent}, built-in {built_in}")
    print(f"they differ by {abs(statistics.mean(agent) - statistics.mean(built_in)):.3f}, seeds by up to {noise:.3f}")


if __name__ == "__main__":
    sys.exit(main())
