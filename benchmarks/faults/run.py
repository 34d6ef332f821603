"""Break systems while they train, and count what each loses, trains twice, or trains falsely.

    python benchmarks/faults/run.py --systems trinity trl --cpu
    python benchmarks/faults/run.py --systems trinity --cpu --cases kill-trainer grader-hangs --runs 3
    python benchmarks/faults/run.py --systems trinity trl verl --gpu  the first GPU of CUDA_VISIBLE_DEVICES
    python benchmarks/faults/run.py --systems trl-server --gpu        the first two

Each system trains the same rows once, from the same model, with its own documented recovery. docs/faults.md says how
the figures are found. Prints a table; results.json in --folder has every run, and is written after each.
Results of other cases there stay, so that the table can be made in parts.
"""

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import audit
from cases import CASES, DISK_MB, Case, Run
from picture import draw
from systems.base import ROOT, Settings, System
from systems.trinity_system import Trinity
from systems.trl_server import TrlServer
from systems.trl_system import Trl
from systems.verl_system import Verl

SYSTEMS: dict[str, System] = {one.name: one for one in (Trinity(), Trl(), TrlServer(), Verl())}
COLUMNS = {
    "rows_skipped": "skipped",
    "rows_twice": "twice",
    "groups_partly": "partly",
    "ungraded": "ungraded",
    "other_weights": "other weights",
    "other_batch": "other batch",
    "not_finite": "not finite",
    "lost": "lost",
    "turns_lost": "turns lost",
    "acted": "acted again",
    "steps_undone": "undone",
}
ABSENT = "has no such part"
START_SECONDS = 300  # until the first step


@dataclass(frozen=True)
class Result:
    system: str
    case: str
    rows: int  # that the run had to train
    end: str  # "finished", "no step for N s", "exit code N", or why it was not played
    words: str = ""  # the last line of the output, of a run that failed
    seconds: float = 0.0  # from the first step to the last
    back_seconds: float | None = None  # from a fault to the first step beyond those before it: the longest
    figures: audit.Figures | None = None
    progress: Sequence[tuple[float, int]] = ()  # seconds since the first step, steps that the weights are made of
    faults: Sequence[float] = ()  # seconds since the first step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["trinity", "trl"])
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--cpu", action="store_true", help="a tiny model on CPUs, in float32")
    form.add_argument("--gpu", action="store_true", help="the same on one GPU, sampled in bfloat16")
    parser.add_argument("--runs", type=int, help="of each case; else three where randomness decides; medians")
    parser.add_argument("--steps", type=int, default=40, help="each trains four groups of four")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hangs", type=float, default=240, help="seconds without a step after which a run is ended")
    parser.add_argument("--folder", type=Path, help="default: build/faults, or build/faults_gpu")
    form.add_argument("--page", type=Path, help="write table and picture of --folder's results into it, play nothing")
    args = parser.parse_args()
    folder = (args.folder or ROOT / ("build/faults_gpu" if args.gpu else "build/faults")).resolve()
    if args.page:
        write_page(args.page, folder)
        return
    settings = prepare(folder, args.steps, args.seed, args.gpu)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes of a run end with this one
    asked = {(name, case) for name in args.systems for case in args.cases}
    results = [one for one in read_results(folder) if (one.system, one.case) not in asked or one.rows != settings.rows]
    for name in args.systems:
        work = work_of(settings, SYSTEMS[name].ahead)
        played = {one.case for one in results if (one.system, one.rows) == (name, settings.rows)}
        plain = {case.plain for case in CASES if case.name in args.cases} - played
        for case in (one for one in CASES if one.name in {*args.cases, *plain}):
            for number in range(args.runs or case.runs):
                place = folder / "runs" / f"{name}-{case.name}-{number}-{int(time.time())}"
                print(f"{name}: {case.name} ({case.about})", file=sys.stderr, flush=True)
                results.append(play(SYSTEMS[name], case, settings, work, place, args.hangs, number))
                (folder / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    print("\n".join(table(results)))
    for name in args.systems:
        print(f"{name}: {SYSTEMS[name].recovery}")


def prepare(folder: Path, steps: int, seed: int, gpu: bool = False) -> Settings:
    """Makes model and data. Each row has another prompt, so that a prompt says which row it is."""
    model, data = folder / "model", folder / "data"
    tasks, group = 4, 4
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, ROOT / "examples/quickstart/make_model.py", model], check=True)
    data.mkdir(parents=True, exist_ok=True)
    rows = [{"row": row, "question": f"{row // 50}+{row % 50}", "answer": "0"} for row in range(steps * tasks)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings(model, data, len(rows), tasks, group, tokens=24, save_every=5, seed=seed, gpu=gpu)


def read_results(folder: Path) -> list[Result]:
    file = folder / "results.json"
    told = json.loads(file.read_text()) if file.exists() else []
    return [Result(**{**one, "figures": one["figures"] and audit.Figures(**one["figures"])}) for one in told]


def write_page(page: Path, folder: Path) -> None:
    """Writes the table between the marks of the page, and the picture if `kill-trainer` was played."""
    results = read_results(folder)
    before, mark, rest = page.read_text().partition("<!-- faults table -->\n")
    assert mark, f"{page} has no line <!-- faults table -->"
    after = rest.partition("<!-- end of the faults table -->")[2]
    lines = "\n".join(table(results, seconds=False))
    page.write_text(f"{before}{mark}\n{lines}\n\n<!-- end of the faults table -->{after}")
    drawn = {one.system: one for one in results if one.case == "kill-trainer"}
    if drawn:
        curves = {name: (one.progress, one.faults) for name, one in drawn.items()}
        (page.parent / "images/faults.svg").write_text(draw(curves))


def work_of(settings: Settings, ahead: int) -> audit.Work:
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
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return audit.Work(prompts, settings.group, settings.tasks, special, ahead, decode=decode)


def play(
    system: System, case: Case, settings: Settings, work: audit.Work, folder: Path, hangs: float, run: int = 0
) -> Result:
    """One run of a system with a case's faults, from its first command until it ends or makes no more steps.

    `run`: its number among the runs of the case, which draw different victims.
    """
    if case.needs and case.needs not in system.parts:
        return Result(system.name, case.name, settings.rows, ABSENT)
    settings, work = replace(settings, turns=case.turns), replace(work, turns=case.turns)
    records = folder / "records"
    records.mkdir(parents=True)
    (folder / "disk").mkdir()
    struck = {how: [int(share * settings.rows) for share in shares] for how, shares in case.grader.items()}
    (folder / "grader.json").write_text(json.dumps(struck))
    try:
        prefix, variables = namespace(case.within, folder / "disk"), slow_disk(folder) if case.slow_disk else {}
    except FileNotFoundError as error:
        return Result(system.name, case.name, settings.rows, f"not played: {error}")
    system.prepare(settings, folder)
    with Started(system, settings, folder, prefix, variables) as started:
        faults: list[tuple[float, int]] = []  # when, and after how many steps
        strikes = [max(1, round(share * settings.steps)) for share in case.at]
        steps = Steps(records)
        began = time.time()
        while started.is_alive():
            time.sleep(0.2)
            steps.read()
            newest = steps.times[-1] if steps.times else 0.0
            if time.time() - max(newest, began) > (hangs if newest > began else max(hangs, START_SECONDS)):
                break
            if case.strike and len(faults) < len(strikes) and len(steps.times) >= strikes[len(faults)] + len(faults):
                faults.append((time.time(), len(steps.times)))
                chance, number = random.Random(settings.seed + len(faults) + 10 * run), len(faults) - 1
                root, trainer = started.process, lambda: steps.pid
                case.strike(Run(root, trainer, system.sampler, chance, folder, number, started.again, started.beside))
        code = started.code()
    steps.read()
    end = f"no step for {hangs:g} s" if code is None else "finished" if code == 0 else f"exit code {code}"
    words = last_line(folder / "output.txt").replace(f"{folder}/", "") if code else ""
    done = audit.read_steps(records, work)
    lineage = audit.lineage_of(done)
    seconds = steps.times[-1] - steps.times[0] if steps.times else 0.0
    back = max((back_after(moment, lineage) for moment, _ in faults), default=None)
    first = steps.times[0] if steps.times else 0.0
    progress = [(round(step.time - first, 2), place) for step, place in audit.places(done)]
    struck_at = [round(moment - first, 2) for moment, _ in faults]
    figures = audit.audit(records, work)
    return Result(
        system.name, case.name, settings.rows, end, words, seconds, back, figures, progress, struck_at
    )  # fmt: skip


def namespace(within: str, disk: Path) -> list[str]:
    """Returns the prefix of a command that gives it a small disk or a separate network.

    Raises FileNotFoundError if this machine cannot give them.
    """
    inside = {
        "": "",
        "disk": f"mount -t tmpfs -o size={DISK_MB}m none {shlex.quote(str(disk))}",
        "network": "ip link set lo up",
    }[within]
    if not inside:
        return []
    for flags in ("-Urmn", "-mn") if within == "network" else ("-Urm", "-m"):
        command = ["unshare", flags, "sh", "-c", f'{inside} && exec "$@"', "sh"]
        if subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode == 0:
            return command
    raise FileNotFoundError(f"no namespace for a {within} may be made here")


def slow_disk(folder: Path) -> dict[str, str]:
    """Returns the variables for processes with a slow disk. Raises FileNotFoundError without a C compiler."""
    library, source = folder / "slow_disk.so", Path(__file__).with_name("slow_disk.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


class Started:
    """Starts the processes of a run, and kills all of them when the block ends."""

    def __init__(
        self, system: System, settings: Settings, folder: Path, prefix: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self._system, self._folder = system, folder
        self._command = [*prefix, *system.command(settings, folder)]
        paths = [str(Path(__file__).parent), *system.paths(), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **os.environ,
            "PYTHONPATH": ":".join(paths),
            "FAULTS_RECORDS": str(folder / "records"),
            "FAULTS_GRADER": str(folder / "grader.json"),
            **({"FAULTS_DTYPE": "bfloat16"} if settings.gpu else {}),
            **variables,
        }
        self._seen: dict[int, psutil.Process] = {}
        self._beside: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Started":
        self.again()
        return self

    def again(self) -> None:
        self._popen = self._start(self._command)
        self.process = psutil.Process(self._popen.pid)

    def beside(self, what: str) -> "subprocess.Popen[bytes]":
        """Runs a second command of the user; "leave" ends the explorer that joined."""
        if what == "leave":
            self._beside["join"].terminate()
            return self._beside["join"]
        self._beside[what] = self._start(self._system.beside(what, self._folder))
        return self._beside[what]

    def _start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        with (self._folder / "output.txt").open("ab") as out:
            return subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def is_alive(self) -> bool:
        for process in self._family():
            self._seen[process.pid] = process
        for beside in self._beside.values():
            beside.poll()
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
        for popen in (self._popen, *self._beside.values()):
            popen.wait(30)

    def _family(self) -> Iterator[psutil.Process]:
        for pid in (self._popen.pid, *(one.pid for one in self._beside.values())):
            try:
                root = psutil.Process(pid)
                yield root
                yield from root.children(recursive=True)
            except psutil.NoSuchProcess:
                continue


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
    return lines[-1] if lines else ""


def table(results: Sequence[Result], seconds: bool = True) -> Iterator[str]:
    """Yields the lines of a Markdown table, a line for each system and case. `seconds`: also how long it took."""
    order = [(name, case.name) for name in SYSTEMS for case in CASES]
    results = sorted(results, key=lambda one: (order.index((one.system, one.case)), one.rows))
    timed = ["back, s", "pace"] if seconds else []
    heads = ["system", "case", "end", *COLUMNS.values(), *timed, "last weights"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for system, case, rows in dict.fromkeys((one.system, one.case, one.rows) for one in results):
        runs = [one for one in results if (one.system, one.case, one.rows) == (system, case, rows)]
        known = next(one for one in CASES if one.name == case)
        plain = next(one for one in results if (one.system, one.case, one.rows) == (system, known.plain, rows))
        ends = ", ".join(dict.fromkeys(run.end + (f": {run.words[:90]}..." if run.words else "") for run in runs))
        ends = ends.replace("|", "/")
        about = f"{case}: {known.about}"
        if runs[0].figures is None:
            yield f"| {system} | {about} | {ends} |{' |' * (len(heads) - 3)}"
            continue
        told = [ends if ends == "finished" else f"**{ends}**", *(_median(name, runs, known) for name in COLUMNS)]
        if seconds:
            back = [run.back_seconds for run in runs if run.back_seconds is not None]
            pace = statistics.median(plain.seconds / run.seconds if run.seconds else 0.0 for run in runs)
            told += [f"{statistics.median(back):.0f}" if back else "", f"{pace:.2f}"]
        assert plain.figures is not None
        same = sum(run.figures.weights == plain.figures.weights for run in runs if run.figures)
        told.append("" if case == known.plain else f"equal in {same} of {len(runs)}")
        yield f"| {system} | {about} | {' | '.join(told)} |"


def _median(name: str, runs: Sequence[Result], case: Case) -> str:
    """Returns a figure's median; bold if it is not 0, but for steps that were undone and done again.

    Figures of turns are empty for cases whose episodes have one.
    """
    if name in ("turns_lost", "acted") and case.turns == 1:
        return ""
    figures = [run.figures for run in runs if run.figures]
    value = statistics.median(getattr(one, name) for one in figures)
    text = f"{value:g}"
    whole = {"lost": "graded", "turns_lost": "turns_sampled"}.get(name)
    if whole:
        text += f" of {statistics.median(getattr(one, whole) for one in figures):g}"
    return f"**{text}**" if value and name != "steps_undone" else text


if __name__ == "__main__":
    main()
