"""A run that is left alone for hours: what it holds by the minute, and whether that stays flat. Or

    python tests/chaos/long_run.py [--hours 2] [--folder build/long] [--vllm] [--groups 4] [--grader-seconds 0.5]

Processes, protocols and files are those of `trinity run` with the quickstart's model. Without --vllm, processes are
forked with everything imported, and explorers sample with transformers (tests/support/programs/forked_run.py). A
`trinity ui` serves the run beside it and is asked for its pages. Files that a run keeps up to a limit have limits so
small that they are reached within minutes. Prints a line a minute and writes long.jsonl into the
folder; in the end one table, and what grew after the first quarter. Exits with 1 if something did.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

MINUTE = 60.0
# A grader that takes time, as users' graders do: the run then leaves cores to others.
_SLOW_GRADER = """
import time

from trinity.plugins import reward_function


@reward_function("slow_sum")
def slow_sum(item, args):
    time.sleep({seconds})
    return 1.0 if item.response.strip().endswith(str(item.truth)) else 0.0
"""
# What may grow between the second and the last quarter: by this part, and at least by so much.
PART, LEAST = 0.05, {"MB": 4.0, "fds": 4.0, "threads": 2.0, "disk MB": 4.0}


def processes(run: Any) -> Iterator[tuple[str, psutil.Process]]:
    """Name and process of every service, of its children together under its name, and of the supervisor."""
    from trinity.reading.job import read_records

    yield "supervisor", psutil.Process(run.pid)
    for record in read_records(run.job).values():
        for one in record.processes:
            try:
                yield one.name, psutil.Process(one.pid)
            except psutil.NoSuchProcess:
                continue


def held_by(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        return {
            "MB": process.memory_info().rss / 1e6,
            "fds": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }


def streams(run: Any) -> dict[str, dict[str, float]]:
    """Messages and megabytes of each stream, as the embedded nats-server's monitoring port says."""
    from trinity.reading.job import read_records

    for record in read_records(run.job).values():
        for one in record.processes:
            if one.service == "nats":
                address = f"http://{one.metrics}/jsz?accounts=true&streams=true"
                with urllib.request.urlopen(address, timeout=10) as answer:
                    accounts = json.load(answer).get("account_details", [])
                found = {}
                for stream in (stream for account in accounts for stream in account.get("stream_detail", [])):
                    name, state = re.sub(r"^(KV|TRINITY)_", "", stream["name"]), stream["state"]
                    name = name.rsplit(f"_{record.run}", 1)[0].lower()
                    found[name] = {"messages": state["messages"], "MB": state["bytes"] / 1e6}
                return found
    return {}


def disk(folder: Path) -> dict[str, float]:
    """Megabytes by the first folder below the job's and its stage's."""
    found: dict[str, float] = {}
    for place, _, names in os.walk(folder):  # ignores folders that were removed meanwhile
        for path in (Path(place) / name for name in names):
            with contextlib.suppress(OSError):
                if not path.is_symlink():
                    part = re.sub(r"global_step_\d+", "global_step", path.relative_to(folder).parts[0])
                    found[part] = found.get(part, 0.0) + path.stat().st_blocks * 512 / 1e6
    return found


def look(run: Any, step: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"minute": round(seconds / MINUTE, 1), "step": step, "processes": {}}
    for name, process in processes(run):
        try:
            found["processes"][name] = held_by(process)
        except psutil.NoSuchProcess:
            continue
    found["streams"], found["disk"] = streams(run), disk(run.job)
    return found


def series(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Every figure of the lines by name."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, held in line["processes"].items():
            for unit, value in held.items():
                found.setdefault(f"{name} {unit}", []).append(value)
        for name, held in line["streams"].items():
            found.setdefault(f"stream {name} messages", []).append(held["messages"])
        for name, value in line["disk"].items():
            found.setdefault(f"{name} disk MB", []).append(value)
        found.setdefault("disk MB", []).append(sum(line["disk"].values()))
    return found


def grown(values: Sequence[float], unit: str) -> bool:
    """Returns True if the median of the last quarter exceeds that of the second by more than is allowed."""
    quarter = len(values) // 4
    if not quarter:
        return False
    second = statistics.median(values[quarter : 2 * quarter])
    return statistics.median(values[-quarter:]) > second + max(PART * second, LEAST[unit])


def report(lines: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The table of quarters, and the names of what grew."""
    every, bad = series(lines), []
    rows = [("", "start", "1/4", "1/2", "3/4", "end", "")]
    for name, values in sorted(every.items()):
        unit = next((unit for unit in ("disk MB", "MB", "fds", "threads") if name.endswith(unit)), "")
        at = [values[int(part * (len(values) - 1))] for part in (0, 0.25, 0.5, 0.75, 1)]
        grew = bool(unit) and grown(values, unit)
        if grew:
            bad.append(name)
        rows.append((name, *(f"{value:.1f}" if "MB" in name else f"{value:.0f}" for value in at), "grew" * grew))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows), bad


def pages(run: Any, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    from trinity.runtime.process import free_port

    port = free_port()
    command = [sys.executable, "-m", "trinity.cli.main", "ui", "--job", str(run.job), "--port", str(port)]
    with (folder / "ui.out").open("ab") as out:
        return subprocess.Popen(command, env=run.environment, stdout=out, stderr=out), f"http://127.0.0.1:{port}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=Path("build/long"))
    parser.add_argument("--vllm", action="store_true", help="explorers with vLLM, as a user starts a run")
    parser.add_argument("--groups", type=int, default=4, help="of an optimizer step, of 4 rollouts each")
    parser.add_argument("--grader-seconds", type=float, default=0.0, help="that grading a rollout takes")
    parser.add_argument("--report", type=Path, help="print the table of a long.jsonl, and run nothing")
    given = parser.parse_args()
    if given.report:
        table, bad = report([json.loads(line) for line in given.report.read_text().splitlines()])
        print(table)
        return bool(bad)

    from trinity.runtime.torch_builds import hide_unusable_companions

    hide_unusable_companions()
    from support.fakes.explorers.torch_engine import BatchedTorchEngine
    from support.programs.forked_run import ForkedRun
    from support.programs.run import TrinityRun, write_config

    repository, folder = Path(__file__).parents[2], given.folder.resolve()
    folder.mkdir(parents=True)
    quickstart = repository / "examples/quickstart"
    for script, name in (("make_model.py", "model"), ("make_data.py", "data")):
        subprocess.run([sys.executable, str(quickstart / script), str(folder / name)], check=True)
    changes: dict[str, Any] = {
        "name": "long",
        "model": {"max_response_tokens": 16},
        "algorithm": {"repeat_times": 4},
        "buffer": {"batch_size": given.groups, "total_steps": 1_000_000, "total_epochs": 1_000_000},
        "stages": [],
        "monitor": {"metrics_mib": 1, "experiences_mib": 2, "log_mib": 2},  # so small that they are reached
    }
    if given.grader_seconds:
        (folder / "plugins").mkdir()
        (folder / "plugins/slow.py").write_text(_SLOW_GRADER.format(seconds=given.grader_seconds))
        changes["buffer"]["explorer_input"] = {"taskset": {"default_reward_fn_type": "slow_sum"}}
    config = write_config(quickstart / "arithmetic.yaml", folder / "long.yaml", changes)
    paths = {
        "TRINITY_MODEL_PATH": str(folder / "model"),
        "TRINITY_TASKSET_PATH": str(folder / "data"),
        "TRINITY_BUFFER_LOG_KEEP_GIB": "0.002",
        "TRINITY_BUFFER_LINES_MIB": "1",
        "TRINITY_PLUGIN_DIRS": str(folder / "plugins") if given.grader_seconds else "",
    }
    if given.vllm:
        run = TrinityRun(config, folder, **paths)
    else:
        run = ForkedRun(config, folder, BatchedTorchEngine, OMP_NUM_THREADS="1", **paths)
    run.start()
    lines, ui = [], None
    try:
        run.until(lambda status: status["step"], 900, "the first step")
        ui, address = pages(run, folder)
        begin = time.monotonic()
        while (seconds := time.monotonic() - begin) < 3600 * given.hours:
            status = run.poll_status()
            if status is None:
                raise AssertionError(f"the run ended: {run.tail()}")
            line = look(run, int(status["step"] or 0), seconds)  # None: a restarted buffer does not answer yet
            line["processes"]["pages"] = held_by(psutil.Process(ui.pid))
            lines.append(line)
            with (folder / "long.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
            held = " ".join(f"{name} {one['MB']:.0f}" for name, one in line["processes"].items())
            whole = sum(line["disk"].values())
            print(f"{line['minute']:6.1f} min  step {line['step']:6}  MB: {held}  disk {whole:.0f}", flush=True)
            for _ in range(int(MINUTE / 5)):
                for page in ("/", "/api/runs"):
                    with contextlib.suppress(OSError), urllib.request.urlopen(address + page, timeout=10) as answer:
                        answer.read()
                time.sleep(5)
    finally:
        if ui is not None:
            ui.terminate()
        run.end()
    table, bad = report(lines)
    print(table)
    print(f"grew: {', '.join(bad)}" if bad else "flat after the first quarter")
    return bool(bad)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
