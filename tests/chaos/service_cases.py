"""Whole runs whose services stop for a while, see their clock jump, meet a full disk, or find their store cut.

Processes are forked with everything imported, and transformers sample where vLLM would. Steps must come within a minute
after the cause has ended. As a program: `service_cases.py FOLDER SEED` plays the full disk in a mount namespace.
"""

import ctypes
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.cases import WHOLE_RUN, Case, Chosen, Row
from chaos.kill_cases import ALONE
from chaos.killed_run import ChaosRun
from support.programs.forked_run import ForkedRun

ROOT = Path(__file__).parents[2]
STOPPED = ("buffer", "environment", "sync", "trainer", "explorer", "nats")
JUMPING = ("buffer", "environment", "sync", "trainer", "explorer")  # nats-server calls no C library
JUMPS_SECONDS = (3600, -3600)
CUT_STREAMS = ("BATCHES", "EXPERIENCES", "TASKS", "KV_trinity_versions", "KV_trinity_runs")
CUT_BYTES = 20_000
DISK_MB, FULL_SECONDS = 256, 25.0
GOES_ON = "steps come within 60 s after the cause has ended"
ENDS = "exit code 0, and the counts add up"
NO_LETTERS = "no dead letter"
ENDS_OR_GOES_ON = "the run goes on, or ends with a reason"
_START_SECONDS, _FINISH_SECONDS, _GOES_ON_SECONDS = 240.0, 900.0, 60.0
_SLOTS = 64
MADE = "TRINITY_TEST_QUICKSTART"  # the folder with the quickstart's model and data, if it is another

Found = dict[str, list[str]]


class Skipped(Exception):
    """This machine lacks a part that the case needs."""


class ServiceRun(ChaosRun, ForkedRun):
    """A run of the quickstart's model in a folder."""

    def __init__(self, folder: Path, steps: int) -> None:
        made = Path(os.environ.get(MADE) or ROOT / "build/quickstart")
        super().__init__(ROOT, folder, made / "model", made / "data", steps)

    def trains_to(self, step: int) -> None:
        self.until(lambda status: (status["step"] or 0) >= step, _START_SECONDS, f"step {step}")

    def pid_of(self, name: str) -> int | None:
        process = self._process_of(name)
        return process.pid if process is not None else None

    def writes_a_checkpoint(self, begin: float) -> bool:
        """Waits until a checkpoint is begun after that time; False if the run ends before."""
        return self._wait(lambda: self._saves_since(begin), "a checkpoint is written")

    def goes_on(self) -> float | None:
        """Returns the seconds until the trainer notes another step, or ends; None after a minute."""
        self.record.read()
        noted, begin = len(self.record.lines), time.monotonic()
        while (seconds := time.monotonic() - begin) < _GOES_ON_SECONDS:
            self.record.read()
            if len(self.record.lines) > noted or self.has_ended:
                return seconds
            time.sleep(0.1)
        return None

    def judge(self) -> list[str]:
        """Waits for the end of the run. Returns what does not hold of it."""
        code = self.finish(_FINISH_SECONDS)
        if code:
            return [f"exit code {code}: {self.tail()}"]
        return self.audited().differences


def _rows(case: str, runs: int, found: Found) -> list[Row]:
    return [Row(case, invariant, runs, tuple(violations)) for invariant, violations in found.items()]


def play(
    case: str, strike: Callable[[ServiceRun, Found, random.Random], None], steps: int, chosen: Chosen
) -> list[Row]:
    """Runs of `steps` steps, which `strike` troubles."""
    found: Found = {GOES_ON: [], ENDS: []}
    for number in range(1, chosen.runs + 1):
        folder = Path(tempfile.mkdtemp(prefix=f"trinity-chaos-{case}-"))
        run = ServiceRun(folder, steps)
        begin, before = time.monotonic(), sum(map(len, found.values()))
        try:
            run.start()
            run.trains_to(2)
            strike(run, found, random.Random(f"{chosen.seed}/{case}/{number}"))
            found[ENDS] += run.judge()
        except Exception as error:
            found[ENDS].append(f"in {folder}: {type(error).__name__}: {error}")
        finally:
            run.end()
        chosen.say(f"{case} run {number}: {time.monotonic() - begin:.0f} s")
        if sum(map(len, found.values())) == before:
            shutil.rmtree(folder)
    return _rows(case, chosen.runs, found)


def _must_go_on(run: ServiceRun, found: Found, what: str) -> None:
    seconds = run.goes_on()
    if seconds is None:
        found[GOES_ON].append(f"{what}, in {run.folder}: no step within {_GOES_ON_SECONDS:g} s; {run.tail(3)}")
    print(f"  {what}: {'no step' if seconds is None else f'{seconds:.1f} s'}", file=sys.stderr, flush=True)


def stop_each(run: ServiceRun, found: Found, chance: random.Random) -> None:
    """SIGSTOP, and SIGCONT after a while: longer than leases and deadlines of calls."""
    for name in chance.sample(STOPPED, len(STOPPED)):
        pid, seconds = run.pid_of(name), chance.uniform(10, 40)
        if pid is None or run.has_ended:
            found[ENDS].append(f"{name} was not running; the run has ended: {run.has_ended}")
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        _must_go_on(run, found, f"{name} stopped for {seconds:.0f} s")


def _kill(run: ServiceRun, name: str) -> None:
    if (pid := run.pid_of(name)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_again(run: ServiceRun, found: Found, chance: random.Random) -> None:
    """kill -9 of one process, and of the same or another within a second."""
    for _ in range(4):
        first, second, delay = chance.choice(ALONE), chance.choice(ALONE), chance.uniform(0, 1)
        _kill(run, first)
        time.sleep(delay)
        _kill(run, second)
        _must_go_on(run, found, f"{first} killed, {second} {delay:.2f} s later")


def kill_nats_in_a_checkpoint(run: ServiceRun, found: Found, chance: random.Random) -> None:
    for _ in range(4):
        begin, delay = time.time(), chance.uniform(0, 0.2)
        if not run.writes_a_checkpoint(begin):
            found[ENDS].append("the run ended before a checkpoint")
            return
        time.sleep(delay)
        _kill(run, "nats")
        _must_go_on(run, found, f"nats killed {delay:.2f} s into a checkpoint")


def kill_late(run: ServiceRun, found: Found, chance: random.Random) -> None:
    """The last steps, around the last two checkpoints: a kill that comes after the end is none."""
    for back in (5, 4, 3, 2, 1):
        while not run.has_ended and max(run.record.said, default=0) < run.steps - back:
            run.record.read()
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.5))
        _kill(run, chance.choice(ALONE))


class Clocks:
    """The offsets of the wall clocks of processes, as clock_shim.c reads them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offsets: dict[int, int] = {}
        file.write_bytes(bytes(16 * _SLOTS))

    def jump(self, pid: int, seconds: int) -> None:
        self._offsets[pid] = seconds * 10**9
        packed = b"".join(struct.pack("qq", *slot) for slot in list(self._offsets.items())[-_SLOTS:])
        with self._file.open("r+b") as file:
            file.write(packed)


@contextmanager
def shifted_clocks(folder: Path) -> Iterator[Clocks]:
    """Clocks of processes that are started meanwhile. Raises Skipped without a C compiler."""
    if not (compiler := shutil.which("cc") or shutil.which("gcc")):
        raise Skipped("no C compiler for tests/chaos/clock_shim.c")
    shim, file = folder / "clock_shim.so", folder / "clocks"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True, timeout=60)
    ctypes.CDLL(str(shim))  # loads, or raises
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "TRINITY_TEST_CLOCK")}
    clocks = Clocks(file)
    os.environ |= {"LD_PRELOAD": str(shim), "TRINITY_TEST_CLOCK": str(file)}
    try:
        yield clocks
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def jump_each(clocks: Clocks, run: ServiceRun, found: Found, chance: random.Random) -> None:
    """The wall clock of one service is an hour ahead, then an hour behind, then right."""
    for name in chance.sample(JUMPING, len(JUMPING)):
        for seconds in (*chance.sample(JUMPS_SECONDS, 2), 0):
            pid = run.pid_of(name)
            if pid is None or run.has_ended:
                found[ENDS].append(f"{name} was not running; the run has ended: {run.has_ended}")
                return
            clocks.jump(pid, seconds)
            _must_go_on(run, found, f"clock of {name} {seconds:+d} s")


def play_jumps(chosen: Chosen) -> Sequence[Row]:
    with tempfile.TemporaryDirectory(prefix="trinity-chaos-clock-") as folder:
        try:
            with shifted_clocks(Path(folder)) as clocks:
                return play("clock-jumps", partial(jump_each, clocks), 60, chosen)
        except Skipped as why:
            chosen.say(f"clock-jumps: skipped, {why}")
            return [Row("clock-jumps", f"skipped: {why}", 0)]


def play_cuts(chosen: Chosen) -> Sequence[Row]:
    """A run is stopped, the newest file of one stream loses its end, and the same command starts it again."""
    found: Found = {ENDS_OR_GOES_ON: [], NO_LETTERS: []}
    for number in range(1, chosen.runs + 1):
        chance, folder = (
            random.Random(f"{chosen.seed}/cuts/{number}"),
            Path(tempfile.mkdtemp(prefix="trinity-chaos-cut-")),
        )
        run = ServiceRun(folder, 1000)
        try:
            run.start()
            run.trains_to(8 + chance.randrange(3))
            run.signal(signal.SIGTERM)
            run.finish(60)
            kept = shutil.copytree(run.job, folder / "kept")
            for stream in CUT_STREAMS:
                shutil.rmtree(run.job)
                shutil.copytree(kept, run.job)
                size = _cut(run.job, stream, chance.randint(1, CUT_BYTES))
                _start_on_a_cut(run, f"{stream} cut by {size} bytes, in {folder}", found)
        finally:
            run.end()
        if not any(found.values()):
            shutil.rmtree(folder)
    return _rows("store-cuts", chosen.runs, found)


def _cut(job: Path, stream: str, size: int) -> int:
    """Cuts the newest block of a stream, and returns the bytes."""
    blocks = [*job.glob(f"nats/store/jetstream/*/streams/*{stream}*/msgs/*.blk")]
    newest = max((block for block in blocks if block.stat().st_size), key=lambda block: block.stat().st_mtime)
    size = min(size, newest.stat().st_size)
    os.truncate(newest, newest.stat().st_size - size)
    return size


def _start_on_a_cut(run: ServiceRun, what: str, found: Found) -> None:
    run.counts.clear()
    run.start()
    try:
        run.record.read()
        noted, deadline = len(run.record.lines), time.monotonic() + 120
        while not run.has_ended and len(run.record.lines) < noted + 3 and time.monotonic() < deadline:
            run.poll_status()
            time.sleep(0.2)
        told = "goes on" if not run.has_ended else f"ends: {run.tail(1)}"
        if not run.has_ended and len(run.record.lines) < noted + 3:
            found[ENDS_OR_GOES_ON].append(f"{what}: neither a step nor an end in two minutes; {run.tail(3)}")
        elif run.has_ended and not run.tail(1).startswith("trinity: "):
            found[ENDS_OR_GOES_ON].append(f"{what}: ended without a reason; {run.tail(5)}")
        if dead := max((counts["dead_letters"] for counts in run.counts), default=0):
            found[NO_LETTERS].append(f"{what}: {dead} dead letters")
        print(f"  {what}: {told}", file=sys.stderr, flush=True)
        if not run.has_ended:
            run.signal(signal.SIGTERM)
            run.finish(60)
    finally:
        run.kill()


def namespace_command(folder: Path) -> list[str]:
    """Returns a command that mounts a small file system on a folder and runs its arguments. Raises Skipped."""
    mount = f'mount -t tmpfs -o size={DISK_MB}m none {folder} && exec "$@"'
    for flags in (["-Urm"], ["-m"]):
        command = ["unshare", *flags, "sh", "-c", mount, "sh"]
        with suppress(OSError):
            if subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode == 0:
                return command
    raise Skipped("neither a user namespace nor root may mount a tmpfs")


def play_disk(chosen: Chosen) -> Sequence[Row]:
    found: Found = {GOES_ON: [], ENDS: []}
    for number in range(1, chosen.runs + 1):
        with tempfile.TemporaryDirectory(prefix="trinity-chaos-disk-") as folder:
            try:
                command = namespace_command(Path(folder))
            except Skipped as why:
                chosen.say(f"disk-full: skipped, {why}")
                return [Row("disk-full", f"skipped: {why}", 0)]
            program = [sys.executable, __file__, folder, f"{chosen.seed}/{number}"]
            done = subprocess.run([*command, *program], stdout=subprocess.PIPE, text=True, timeout=1500)
            told = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {ENDS: [f"exit {done.returncode}"]}
            for invariant, violations in told.items():
                found[invariant] += violations
    return _rows("disk-full", chosen.runs, found)


def fill_disk(folder: Path, seconds: float) -> None:
    """Takes every byte that is free, and every one that becomes free, for so long."""
    ballast = folder / "ballast"
    end = time.monotonic() + seconds
    with ballast.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            try:
                file.write(b"x" * 4096)
            except OSError:
                time.sleep(0.01)
    ballast.unlink()


def _play_full_disk(folder: Path, seed: str) -> Found:
    """In the namespace. The disk fills up at a random moment; a checkpoint is due every three steps."""
    found: Found = {GOES_ON: [], ENDS: []}
    chance, run = random.Random(seed), ServiceRun(folder, 30)
    output = run.output = Path(tempfile.mkdtemp(prefix="trinity-chaos-disk-out-")) / "run.out"
    try:
        run.start()
        run.trains_to(2)
        time.sleep(chance.uniform(0, 3))
        fill_disk(folder, FULL_SECONDS)
        _must_go_on(run, found, f"disk full for {FULL_SECONDS:g} s")
        for said in ("is full, ", "free again; the run continues"):
            if said not in output.read_text():
                found[GOES_ON].append(f"the screen does not say {said!r}: {run.tail()}")
        found[ENDS] += run.judge()
    except Exception as error:
        found[ENDS].append(f"{type(error).__name__}: {error}")
    finally:
        run.end()
    if any(found.values()):
        shutil.copytree(run.job / "log", output.parent / "log")
        print(f"  what it left is in {output.parent}", file=sys.stderr, flush=True)
    else:
        shutil.rmtree(output.parent)
    return found


def _case(name: str, about: str, runs: int, play: Any) -> Case:
    return Case(name, about, WHOLE_RUN, runs, play)


CASES = [
    _case("disk-full", f"the disk of the job folder is full for {FULL_SECONDS:g} s, then free", 3, play_disk),
    _case(
        "services-stopped",
        "SIGSTOP of each service for 10 to 40 s",
        2,
        partial(play, "services-stopped", stop_each, 40),
    ),
    _case("kill-again", "kill -9 within a second of a kill -9", 5, partial(play, "kill-again", kill_again, 30)),
    _case(
        "kill-nats-in-a-checkpoint",
        "kill -9 of nats-server while a checkpoint is written",
        5,
        partial(play, "kill-nats-in-a-checkpoint", kill_nats_in_a_checkpoint, 30),
    ),
    _case("kill-late", "kill -9 in the last five steps", 5, partial(play, "kill-late", kill_late, 12)),
    _case("clock-jumps", "the wall clock of each service jumps by an hour, forth and back", 2, play_jumps),
    _case("store-cuts", "a stopped run finds the end of one stream cut off", 3, play_cuts),
]


if __name__ == "__main__":
    print(json.dumps(_play_full_disk(Path(sys.argv[1]), sys.argv[2])))
