"""Break systems while they train, and count what each loses, trains twice, or trains falsely.

    python benchmarks/faults/run.py --systems trinity trl --cpu
    python benchmarks/faults/run.py --systems trinity --cpu --cases kill-trainer grader-hangs --runs 3

Each system trains the same rows once, from the same model, with its own documented recovery. docs/faults.md says how
the figures are found. Prints a table; build/faults/results.json has every run, and is written after each.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import audit
from cases import CASES, Case, Run
from systems.base import ROOT, Settings, System
from systems.trinity_system import Trinity
from systems.trl_system import Trl

SYSTEMS: dict[str, System] = {"trinity": Trinity(), "trl": Trl()}
COLUMNS = {
    "rows_skipped": "skipped",
    "rows_twice": "twice",
    "groups_partly": "partly",
    "ungraded": "ungraded",
    "lost": "lost",
    "steps_undone": "undone",
}
START_SECONDS = 300  # until the first step


@dataclass(frozen=True)
class Result:
    system: str
    case: str
    end: str  # "finished", "hangs" or "exit code N"
    words: str  # the last line of the output, of a run that did not finish
    seconds: float  # from the first step to the last
    back_seconds: float | None  # from a fault to the first step beyond those before it: the longest
    figures: audit.Figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    parser.add_argument("--cpu", action="store_true", help="the only form so far: a tiny model on CPUs")
    parser.add_argument("--runs", type=int, default=1, help="of each case; the table has medians")
    parser.add_argument("--steps", type=int, default=40, help="each trains four groups of four")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hangs", type=float, default=240, help="seconds without a step after which a run hangs")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/faults")
    args = parser.parse_args()
    if not args.cpu:
        parser.error("say --cpu: there is no form for GPUs yet")
    folder = args.folder.resolve()
    settings = prepare(folder, args.steps, args.seed)
    work = work_of(settings)
    results: list[Result] = []
    chosen = [case for case in CASES if case.name in args.cases or case.name == "none"]  # what others are compared with
    for name in args.systems:
        for case in chosen:
            for number in range(args.runs):
                place = folder / "runs" / f"{name}-{case.name}-{number}-{int(time.time())}"
                print(f"{name}: {case.name} ({case.about})", file=sys.stderr, flush=True)
                results.append(play(SYSTEMS[name], case, settings, work, place, args.hangs))
                (folder / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    print("\n".join(table(results)))
    for name in args.systems:
        print(f"{name}: {SYSTEMS[name].recovery}")


def prepare(folder: Path, steps: int, seed: int) -> Settings:
    """Makes model and data. Each row has another prompt, so that a prompt says which row it is."""
    model, data = folder / "model", folder / "data"
    tasks, group = 4, 4
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, ROOT / "examples/quickstart/make_model.py", model], check=True)
    data.mkdir(parents=True, exist_ok=True)
    rows = [{"row": row, "question": f"{row // 50}+{row % 50}", "answer": "0"} for row in range(steps * tasks)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings(model, data, len(rows), tasks, group, tokens=24, save_every=5, seed=seed)


def work_of(settings: Settings) -> audit.Work:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    rows = [json.loads(line) for line in (settings.data / "train.jsonl").read_text().splitlines()]
    prompts = [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["question"]}], add_generation_prompt=True, return_dict=False
            )
        )
        for row in rows
    ]
    special = frozenset({tokenizer.eos_token_id, tokenizer.pad_token_id})
    return audit.Work(prompts, settings.group, settings.tasks, special)


def play(system: System, case: Case, settings: Settings, work: audit.Work, folder: Path, hangs: float) -> Result:
    """One run of a system with a case's faults, from its first command until it ends or hangs."""
    records = folder / "records"
    records.mkdir(parents=True)
    struck = {how: [int(share * settings.rows) for share in shares] for how, shares in case.grader.items()}
    (folder / "grader.json").write_text(json.dumps(struck))
    system.prepare(settings, folder)
    with Started(system, settings, folder) as started:
        faults: list[tuple[float, int]] = []  # when, and after how many steps
        strikes = [max(1, round(share * settings.steps)) for share in case.at]
        steps = Steps(records)
        began = time.time()
        while started.is_alive():
            time.sleep(0.2)
            steps.read()
            newest = steps.times[-1] if steps.times else 0.0
            if time.time() - max(newest, began) > (hangs if newest > began else START_SECONDS):
                break
            if case.strike and len(faults) < len(strikes) and len(steps.times) >= strikes[len(faults)] + len(faults):
                faults.append((time.time(), len(steps.times)))
                run = Run(started.process, lambda: steps.pid, random.Random(settings.seed + len(faults)), started.again)
                case.strike(run)
        code = started.code()
    steps.read()
    end = "hangs" if code is None else "finished" if code == 0 else f"exit code {code}"
    words = "" if end == "finished" else last_line(folder / "output.txt")
    lineage = audit.lineage_of(audit.read_steps(records, work))
    seconds = steps.times[-1] - steps.times[0] if steps.times else 0.0
    back = max((back_after(moment, lineage) for moment, _ in faults), default=None)
    return Result(system.name, case.name, end, words, seconds, back, audit.audit(records, work))


class Started:
    """Starts the processes of a run, and kills all of them when the block ends."""

    def __init__(self, system: System, settings: Settings, folder: Path) -> None:
        self._command, self._folder = system.command(settings, folder), folder
        paths = [str(Path(__file__).parent), *system.paths()]
        self._environment = {
            **os.environ,
            "PYTHONPATH": ":".join(paths),
            "FAULTS_RECORDS": str(folder / "records"),
            "FAULTS_GRADER": str(folder / "grader.json"),
        }
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> "Started":
        self.again()
        return self

    def again(self) -> None:
        with (self._folder / "output.txt").open("ab") as out:
            self._popen = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        self.process = psutil.Process(self._popen.pid)

    def is_alive(self) -> bool:
        for process in self._family():
            self._seen[process.pid] = process
        return self._popen.poll() is None

    def code(self) -> int | None:
        return self._popen.poll()

    def __exit__(self, *_: object) -> None:
        self.is_alive()
        for process in self._seen.values():
            try:
                process.kill()  # psutil knows a pid that another process has now
            except psutil.NoSuchProcess:
                continue
        self._popen.wait(30)

    def _family(self) -> Iterator[psutil.Process]:
        try:
            yield self.process
            yield from self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return


class Steps:
    """Times of the optimizer steps that the probe recorded, read as they come."""

    def __init__(self, records: Path) -> None:
        self._records, self._read = records, dict[Path, int]()
        self.times: list[float] = []
        self.pid = 0  # of the process that computed the newest

    def read(self) -> None:
        for path in self._records.glob("train-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] = self._read.get(path, 0) + len(line)
                    if b'"kind": "step"' in line:
                        step = json.loads(line)
                        self.times.append(step["time"])
                        self.pid = step["pid"]


def back_after(moment: float, lineage: Sequence[audit.Step]) -> float:
    """Seconds from a moment to the first step of the lineage after it, infinite without one.

    Steps of the lineage are beyond what the fault left: steps that are done again come before them, and count as
    seconds without training.
    """
    return min((step.time for step in lineage if step.time > moment), default=float("inf")) - moment


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yields the lines of a Markdown table, a line for each system and case."""
    yield f"| system | case | end | {' | '.join(COLUMNS.values())} | back, s | pace | weights |"
    yield f"|{'---|' * (len(COLUMNS) + 6)}"
    for system, case in dict.fromkeys((result.system, result.case) for result in results):
        runs = [result for result in results if (result.system, result.case) == (system, case)]
        plain = next(result for result in results if (result.system, result.case) == (system, "none"))
        counts = [f"{statistics.median(getattr(run.figures, name) for run in runs):g}" for name in COLUMNS]
        back = [run.back_seconds for run in runs if run.back_seconds is not None]
        pace = statistics.median(plain.seconds / run.seconds if run.seconds else 0.0 for run in runs)
        same = sum(run.figures.weights == plain.figures.weights for run in runs)
        ends = ", ".join(dict.fromkeys(run.end for run in runs))
        values = [
            *counts,
            f"{statistics.median(back):.0f}" if back else "",
            f"{pace:.2f}",
            f"equal in {same} of {len(runs)}",
        ]
        yield f"| {system} | {case} | {ends} | {' | '.join(values)} |"


if __name__ == "__main__":
    main()
