"""Prints learning curves of three examples: self-play, live traffic, and self-distillation.

    python benchmarks/learning_curves.py [players traffic distillation] [--seeds 2] [--folder FOLDER --runs 1]
    python benchmarks/learning_curves.py --tiny      short runs: shows that it runs, measures nothing

The runs are those of examples/players/nim.yaml, examples/traffic and examples/quickstart/self_distillation.yaml, on the
tiny models of their READMEs. The runs of an example begin with the same weights. A seed is that of sampling, and of the
order of rows or the users' questions. Shown are evaluations at quarters of the steps: the share of good moves in Nim,
and the accuracy of greedy answers to sums that are not trained. The limit is a gain in every run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from agents_learning import EXAMPLES, python, run
from buffer_table import Table

from trinity.runtime.process import free_port
from trinity.study.results import collect

CALLS_PER_SECOND, DELAY_SECONDS = 20.0, 10.0


def players(folder: Path, args: argparse.Namespace) -> list[list[float]]:
    made = folder / "nim"
    if not (made / "data").exists():
        python(EXAMPLES / "players/make_nim.py", made, "--steps", args.warm_up)
    config = _read("players/nim.yaml")
    config["model"]["model_path"] = str(made / "model")
    for taskset in (tasks := config["buffer"]["explorer_input"])["tasksets"] + tasks["eval_tasksets"]:
        taskset["path"] = str(made / "data")
    config["explorer"]["older_versions"]["every"] = args.steps // 4
    config["synchronizer"]["versions_to_keep"] = args.steps + 2
    return [_curve(folder, config, "players", "best_moves", seed, args) for seed in range(args.seeds)]


def traffic(folder: Path, args: argparse.Namespace) -> list[list[float]]:
    """Users ask 20 times a second, and reward each answer up to ten seconds later."""
    data = _sums(folder)
    config = _read("traffic/sums.yaml")
    sft, _ = config.pop("stages")
    del sft["stage_name"]
    begun = {**config, **sft, "name": "traffic-sft"}
    weights = _warmed_up(folder, begun, data, "train", 2 * args.warm_up // 3, args)
    config["model"]["model_path"] = str(weights)
    for taskset in config["buffer"]["explorer_input"]["eval_tasksets"]:
        taskset["path"] = str(data)
    curves = []
    for seed in range(args.seeds):
        config["explorer"]["proxy_port"] = port = free_port()
        keys = folder / f"jobs/{config['project']}/traffic-{seed}/serve.keys"
        with (
            nullcontext() if (folder / f"traffic-{seed}.finished").exists() else _users(folder, port, keys, data, seed)
        ):
            curves.append(_curve(folder, config, "traffic", "accuracy", seed, args))
    return curves


@contextmanager
def _users(folder: Path, port: int, keys: Path, data: Path, seed: int) -> Iterator[None]:
    line = [sys.executable, str(EXAMPLES / "traffic/users.py"), "--url", f"http://127.0.0.1:{port}/v1"]
    line += ["--key-file", str(keys), "--data", str(data / "train.jsonl"), "--seed", str(seed)]
    line += ["--calls-per-second", str(CALLS_PER_SECOND), "--delay", str(DELAY_SECONDS)]
    with (folder / f"users-{seed}.out").open("w") as out, subprocess.Popen(line, stdout=out, stderr=out) as users:
        try:
            yield
        finally:
            users.kill()


def distillation(folder: Path, args: argparse.Namespace) -> list[list[float]]:
    data = _sums(folder)
    begun = {**_read("algorithms/sft.yaml"), "name": "distillation-sft"}
    begun["model"]["max_prompt_tokens"] = 48
    weights = _warmed_up(folder, begun, data, "told", args.warm_up, args)
    config = _read("quickstart/self_distillation.yaml")
    for model in (config["model"], *config["explorer"]["auxiliary_models"]):
        model["model_path"] = str(weights)
    tasks = config["buffer"]["explorer_input"]
    for taskset in (tasks["taskset"], *tasks["eval_tasksets"]):
        taskset["path"] = str(data)
    return [_curve(folder, config, "distillation", "accuracy", seed, args) for seed in range(args.seeds)]


CURVES = {"players": players, "traffic": traffic, "distillation": distillation}


def _read(example: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / example).read_text())
    return found


def _sums(folder: Path) -> Path:
    """The quickstart's model and data, with the rows of algorithms that need more."""
    data = folder / "sums"
    if not (data / "told.jsonl").exists():
        python(EXAMPLES / "quickstart/make_model.py", folder / "model")
        python(EXAMPLES / "quickstart/make_data.py", data)
        python(EXAMPLES / "algorithms/make.py", "--data", data)
    return data


def _warmed_up(
    folder: Path, begun: dict[str, Any], data: Path, split: str, steps: int, args: argparse.Namespace
) -> Path:
    """The weights after SFT."""
    begun["model"]["model_path"] = str(folder / "model")
    begun["buffer"]["total_steps"] = steps
    begun["buffer"]["trainer_input"]["experience_buffer"].update(path=str(data), split=split)
    run(folder, begun, folder, args)
    return folder / f"jobs/{begun['project']}/{begun['name']}/global_step_{steps}/actor/huggingface"


def _curve(
    folder: Path, config: dict[str, Any], name: str, metric: str, seed: int, args: argparse.Namespace
) -> list[float]:
    """The metric before the first step and after each quarter of the steps."""
    config = json.loads(json.dumps(config))
    config["name"] = f"{name}-{seed}"
    config["buffer"]["total_steps"] = args.steps
    if args.batch:
        config["buffer"]["batch_size"] = args.batch
    config["explorer"].update(eval_interval=args.steps // 4, rollout_model={"seed": seed})
    tasks = config["buffer"]["explorer_input"]
    for number, taskset in enumerate(tasks.get("tasksets", [tasks.get("taskset", {})])):
        if "data_selector" in taskset:
            taskset["data_selector"]["seed"] = 10 * seed + number
    run(folder, config, folder, args)
    curves = collect([folder / f"jobs/{config['project']}/{config['name']}"], [metric])
    points = dict(point for curve in curves for point in curve.points)  # mean@n, of n games that have the metric
    found = [value for _, value in sorted(points.items())]
    print(config["name"], " ".join(f"{value:.3f}" for value in found), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", help=f"of {', '.join(CURVES)}; else all")
    for name, value in {"steps": 40, "seeds": 2, "warm-up": 300, "batch": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", type=Path, help="of the runs, which stay there: a second call does what is left")
    parser.add_argument("--runs", type=int, default=1000, help="the most runs of this call; SFT is one of them")
    parser.add_argument("--tiny", action="store_true", help="a few steps")
    if "--tiny" in sys.argv:
        parser.set_defaults(steps=4, seeds=1, warm_up=40, batch=2)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of tiny models wait for each other where others work too
    if unknown := set(args.examples) - set(CURVES):
        parser.error(f"unknown example: {', '.join(unknown)}; choose from {', '.join(CURVES)}")
    table = Table(
        f"evaluations by steps, {args.seeds} seeds",
        ("example", "seed", *(str(args.steps * part // 4) for part in range(5)), "gain", "limit"),
    )
    rises = True
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory(prefix="trinity-bench-") as name:
        for example in args.examples or CURVES:
            folder = Path(name).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            for seed, curve in enumerate(CURVES[example](folder, args)):
                gain = curve[-1] - curve[0]
                rises &= gain > 0
                figures = [f"{value:.3f}" for value in curve]
                table.rows.append((example, str(seed), *figures, f"{gain:+.3f}", "> 0" if gain > 0 else "> 0 MISSED"))
    table.show()
    return 0 if rises or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
