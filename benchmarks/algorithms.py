"""Runs every algorithm of examples/algorithms from its YAML with several seeds, from one model that knows some sums.

    python benchmarks/algorithms.py [--names grpo,ppo] [--steps 40] [--seeds 0,1,2] [--device cpu] [--jobs 2] [--table]

Each run adds a line of JSON to <out>/results.jsonl. Runs in this file are skipped, so the same command resumes after a
break. --table writes the results into docs/algorithms_measured.md. With GPUs, each job gets an equal share of the
visible ones.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
BEGIN, END = "<!-- learning table -->", "<!-- end of the learning table -->"
RUN_SECONDS = 3600.0
FEW = 3  # steps at either end whose mean reward counts


def results_of(file: Path) -> list[dict[str, Any]]:
    """Results of earlier calls."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trinity(config: Path, folder: Path, environment: dict[str, str], *overrides: str) -> tuple[int, str]:
    """Exit code and the end of the output of a run."""
    from trinity.runtime.process import tied

    command = tied([sys.executable, "-m", "trinity.cli.main", "run", "--config", str(config), *overrides])
    inherited = {**os.environ, "TRINITY_CHECKPOINT_ROOT_DIR": str(folder), **environment}
    done = subprocess.run(
        command, env=inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_SECONDS, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace")[-2000:]


def learnt(job: Path) -> Path:
    """The Hugging Face folder of a job's newest checkpoint."""
    step = (job / "latest_checkpointed_iteration.txt").read_text()
    return job / f"global_step_{step}/actor/huggingface"


def prepare(out: Path, environment: dict[str, str], warm_steps: int, teacher_steps: int) -> dict[str, str]:
    """Make model, data, initial model and teacher once in `out`. Returns the variables of the YAMLs."""
    data = out / "data"
    if not data.exists():
        for command in (["quickstart/make_model.py", str(out / "model")], ["quickstart/make_data.py", str(data)],
                        ["algorithms/make.py", "--data", str(data)]):  # fmt: skip
            subprocess.run([sys.executable, str(EXAMPLES / command[0]), *command[1:]], check=True, capture_output=True)
    variables = {"TRINITY_TASKSET_PATH": str(data), "TRINITY_MODEL_PATH": str(out / "model")}
    for name, split, steps in (("warm", "train", warm_steps), ("teacher", "teacher", teacher_steps)):
        job = out / name / "algorithms/sft"
        if not (job / "latest_checkpointed_iteration.txt").exists():
            source = "buffer.trainer_input.experience_buffer"
            changes = (f"buffer.total_steps={steps}", f"{source}.split={split}")
            code, said = trinity(EXAMPLES / "algorithms/sft.yaml", out / name, {**environment, **variables}, *changes)
            if code:
                raise SystemExit(f"{name}: {said}")
    begin, teacher = (str(learnt(out / name / "algorithms/sft")) for name in ("warm", "teacher"))
    return {**variables, "TRINITY_MODEL_PATH": begin, "TRINITY_TEACHER_PATH": teacher}


def run(name: str, seed: int, steps: int, out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Play one run and return its results."""
    config, begin = EXAMPLES / f"algorithms/{name}.yaml", time.monotonic()
    values, changes = yaml.safe_load(config.read_text()), [f"buffer.total_steps={steps}"]
    if values.get("mode") == "train":
        changes.append(f"buffer.trainer_input.experience_buffer.data_selector.seed={seed}")
    else:
        changes += [f"buffer.explorer_input.taskset.data_selector.seed={seed}"]
        changes += [f"explorer.rollout_model.seed={seed}"]
    folder = out / f"runs/{name}_{seed}_{steps}"
    code, said = trinity(config, folder, environment, *changes)
    found: dict[str, Any] = {"algorithm": name, "seed": seed, "steps": steps, "seconds": time.monotonic() - begin}
    if code:
        return {**found, "error": said}
    return {**found, **measured(folder / f"algorithms/{name}")}


def measured(job: Path) -> dict[str, Any]:
    """Mean reward and loss of the first and the last few steps, at rollout."""
    rewards = [line["rollout/accuracy/mean"] for line in _lines(job, "explorer") if "rollout/accuracy/mean" in line]
    trained = _lines(job, "trainer")
    key = next((k for k in ("actor/pg_loss", "actor/sft_loss", "actor/dpo_margin") if trained and k in trained[-1]), "")
    values = [line[key] for line in trained if key in line]
    found: dict[str, Any] = {"measure": key, "trained_steps": len(trained)}
    for what, numbers in (("reward", rewards), ("value", values)):
        if numbers:
            found[f"{what}_start"] = sum(numbers[:FEW]) / len(numbers[:FEW])
            found[f"{what}_end"] = sum(numbers[-FEW:]) / len(numbers[-FEW:])
    return found


def _lines(job: Path, name: str) -> list[dict[str, Any]]:
    file = job / f"monitor/{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(results: list[dict[str, Any]]) -> str:
    """A row for each algorithm and number of steps: means over seeds. Runs too short to learn share one line."""
    short = sorted({r["algorithm"] for r in results if r["steps"] <= FEW and r.get("trained_steps") == r["steps"]})
    results = [r for r in results if r["steps"] > FEW or "error" in r]
    rows = ["| algorithm | seeds | reward at the start | at the end | steps | seconds |", "|---|---|---|---|---|---|"]
    kinds = sorted({(r["algorithm"], r["steps"]) for r in results})
    for name, steps in kinds:
        chosen = [r for r in results if (r["algorithm"], r["steps"]) == (name, steps)]
        good = [r for r in chosen if "error" not in r]
        seeds = f"{len(good)}" if len(good) == len(chosen) else f"{len(good)} of {len(chosen)}"
        ends = " | ".join(_spread([r[key] for r in good if key in r]) for key in ("reward_start", "reward_end"))
        seconds = f"{sum(r['seconds'] for r in good) / len(good):.0f}" if good else "-"
        rows.append(f"| `{name}` | {seeds} | {ends} | {steps} | {seconds} |")
    if short:
        rows += ["", f"Ran {FEW} steps to the end: {', '.join(f'`{name}`' for name in short)}."]
    return "\n".join(rows)


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def write_table(results: list[dict[str, Any]], document: Path) -> None:
    """Write the text between the two marks of the page."""
    text = document.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    document.write_text(f"{head}\n{table(results)}\n{tail}")


def shares(device: str, jobs: int) -> list[dict[str, str]]:
    """The environment variables of each job, with its share of the GPUs."""
    from trinity.runtime.devices import visible_gpus

    cards = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and not cards:
        raise SystemExit("--device cuda: no GPU is visible")
    size = len(cards) // jobs
    if cards and not size:
        raise SystemExit(f"--jobs {jobs}: there are {len(cards)} GPUs")
    # Trainer and engine take turns, and threads of a tiny model mostly wait for each other.
    threads = {} if cards else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (2 * jobs)))}
    return [{"CUDA_VISIBLE_DEVICES": ",".join(cards[job * size : (job + 1) * size]), **threads} for job in range(jobs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in (EXAMPLES / "algorithms").glob("*.yaml"))
    parser.add_argument("--names", default=",".join(known), help="algorithms, by commas; else all")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run")
    parser.add_argument("--seeds", default="0", help="seeds, by commas: of the order of tasks and of the sampler")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the runs are")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--warm-steps", type=int, default=200, help="SFT steps of the model that all begin with")
    parser.add_argument("--teacher-steps", type=int, default=300, help="SFT steps of the teacher, on worked answers")
    parser.add_argument("--out", type=Path, default=ROOT / "build/algorithms", help="folder of results and runs")
    parser.add_argument("--table", action="store_true", help="write the table into docs/algorithms_measured.md")
    args = parser.parse_args()
    names = args.names.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"--names: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    out, file = args.out.absolute(), args.out.absolute() / "results.jsonl"
    environments = shares(args.device, args.jobs)
    out.mkdir(parents=True, exist_ok=True)
    variables = prepare(out, environments[0], args.warm_steps, args.teacher_steps)
    done = {(r["algorithm"], r["seed"], r["steps"]) for r in results_of(file) if "error" not in r}
    free: SimpleQueue[dict[str, str]] = SimpleQueue()
    for environment in environments:
        free.put(environment)

    def one(wanted: tuple[str, int]) -> dict[str, Any]:
        place = free.get()
        try:
            return run(*wanted, args.steps, out, {**variables, **place})
        finally:
            free.put(place)

    wanted = [(name, int(seed)) for seed in args.seeds.split(",") for name in names]
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(one, [w for w in wanted if (*w, args.steps) not in done]):
            with file.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    newest = {(r["algorithm"], r["seed"], r["steps"]): r for r in results_of(file)}
    print(table(list(newest.values())))
    if args.table:
        write_table(list(newest.values()), ROOT / "docs/algorithms_measured.md")


if __name__ == "__main__":
    main()
