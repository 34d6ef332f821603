"""What a person at a terminal reads when the processes of a run die, and at Ctrl-C: every line, on real parts.

One GRPO run: kill -9 of each process in turn, Ctrl-C, the same command, Ctrl-C twice, the same command to its end.
"""

import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.programs.run import write_config
from support.programs.terminal import Screen, Terminal
from trinity.reading.job import read_records

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, SAVE_INTERVAL, COLUMNS = 90, 5, 120
WHERE = rf"at step (\d+) of {STEPS} of stage accidents"
THEN = {
    "explorer": "its tasks are given out again",
    "trainer": f"it continues {WHERE}",
    "environment": "the others wait for it",
    "sync": "the others wait for it",
    "buffer": "the others wait for it",
    "nats": "the others wait for it",
}
OPENING = rf"stage accidents: grpo, {STEPS} steps of 8 groups of 2, on CPU; logs in jobs/quickstart/accidents/log"
DEATHS = [rf"{name} died: killed by SIGKILL; restart 1 of 5 in 0\.5 s; {then}" for name, then in THEN.items()]
AGAIN = [rf"{name} serves again, \d+ s after its start" for name in THEN]
SAVES = "SIGINT: the trainer saves a checkpoint after the running step, then the run ends; Ctrl-C ends it at once"
ENDED = f"trinity: ended by SIGINT; the same command resumes the run {WHERE}"
LAST = (
    rf"stage accidents is finished: {STEPS} steps in \d+:\d\d, accuracy [\d.]+ -> [\d.]+ of sums-test, "
    r"reward [\d.]+ -> [\d.]+",
    r"the run is finished in \d+:\d\d: accuracy [\d.]+ -> [\d.]+, reward [\d.]+ -> [\d.]+",
    rf"model: jobs/quickstart/accidents/global_step_{STEPS}/actor/huggingface \(step {STEPS}\)",
    "summary: jobs/quickstart/accidents/summary.json",
    "next:",
    "  trinity ui --job jobs/quickstart/accidents    # curves, samples, tokens",
    "  trinity serve --job jobs/quickstart/accidents    # an OpenAI-compatible endpoint",
    "  trinity convert --checkpoint-dir jobs/quickstart/accidents    # Hugging Face folders",
)


@dataclass
class Evening:
    """What the terminal showed during each command, and their exit codes."""

    texts: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def said(self, number: int) -> list[str]:
        """The lines that stay after the command, which erases its table. A long one goes on in the next."""
        screen = Screen(COLUMNS)
        screen.write(self.texts[number])
        text = "".join(line if len(line) == COLUMNS else f"{line}\n" for line in screen.lines)
        return [line.removeprefix("^C").rstrip() for line in text.splitlines() if line.removeprefix("^C").strip()]


@pytest.fixture(scope="module")
def evening(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Evening:
    folder = tmp_path_factory.mktemp("screen")
    changes = {
        "name": "accidents",
        "model": {"max_response_tokens": 16},
        "buffer": {"batch_size": 8, "total_steps": STEPS},
        "algorithm": {"repeat_times": 2},
        "explorer": {"eval_interval": STEPS},
        "trainer": {"save_interval": SAVE_INTERVAL},
        "monitor": {"ui": False},
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "accidents.yaml", changes)
    given = {"TRINITY_MODEL_PATH": quickstart_model, "TRINITY_TASKSET_PATH": quickstart_data}
    environment = {**os.environ, **{name: str(path) for name, path in given.items()}}
    environment["TRINITY_CHECKPOINT_ROOT_DIR"] = "jobs"
    evening, job = Evening(), folder / "jobs/quickstart/accidents"
    command = [sys.executable, "-m", "trinity.cli.main", "run", "--config", str(config)]
    for play in (_accidents, _two_keys, _to_the_end):
        with Terminal(command, folder, COLUMNS, environment=environment) as terminal:
            play(terminal, job)
            evening.codes.append(terminal.ended(120))
            evening.texts.append(terminal.text)
    return evening


def _accidents(terminal: Terminal, job: Path) -> None:
    _until_a_step(terminal)
    for victim in THEN:
        os.kill(_pid(job, victim), signal.SIGKILL)
        terminal.expect(rf"{victim} died: ", 60)
        terminal.expect(rf"{victim} serves again", 180)
    _until_a_step(terminal)
    terminal.interrupt()


def _two_keys(terminal: Terminal, job: Path) -> None:
    _until_a_step(terminal)
    terminal.interrupt()
    time.sleep(0.3)
    terminal.interrupt()


def _to_the_end(terminal: Terminal, job: Path) -> None:
    terminal.expect("the run is finished", 500)


def _until_a_step(terminal: Terminal) -> None:
    terminal.expect(rf" \d+/{STEPS}, \d+:\d\d elapsed, \d+:\d\d left", 240)


def _pid(job: Path, name: str) -> int:
    return next(process.pid for process in read_records(job)["main"].processes if process.name == name)


def _unexpected(lines: list[str], *known: str) -> list[str]:
    """Lines that no pattern knows. A process may wait for another, and say so."""
    waits = r"\w+ waits for \S.*"
    return [line for line in lines if not any(re.fullmatch(one, line) for one in (*known, waits))]


@pytest.mark.parametrize("victim", THEN)
def test_a_death_has_its_cause_and_what_the_run_does(evening: Evening, victim: str) -> None:
    lines = evening.said(0)
    death = next(one for one in DEATHS if one.startswith(victim))
    places = [[n for n, line in enumerate(lines) if re.fullmatch(one, line)]
              for one in (death, rf"{victim} serves again, \d+ s after its start")]  # fmt: skip
    assert [len(found) for found in places] == [1, 1], "\n".join(lines)
    assert places[0] < places[1]


def test_the_trainer_continues_at_the_step_after_its_checkpoint(evening: Evening) -> None:
    step = next(int(found[1]) for line in evening.said(0) if (found := re.fullmatch(DEATHS[1], line)))
    assert step % SAVE_INTERVAL == 1


def test_nothing_else_is_said(evening: Evening) -> None:
    saved = r"the checkpoint of step \d+ is saved"
    assert _unexpected(evening.said(0), OPENING, *DEATHS, *AGAIN, SAVES, saved, ENDED) == []
    at_once = "ended at once, without a checkpoint of the newest steps"
    assert _unexpected(evening.said(1), OPENING, SAVES, at_once, saved, ENDED) == []
    assert _unexpected(evening.said(2), OPENING, *LAST) == []


def test_ctrl_c_names_the_step_at_which_the_same_command_goes_on(evening: Evening) -> None:
    assert evening.codes == [130, 130, 0]
    for number in (0, 1):
        at = re.fullmatch(ENDED, evening.said(number)[-1])
        assert at, evening.said(number)
        first = re.search(rf" (\d+)/{STEPS}, ", evening.texts[number + 1])
        assert first and int(first[1]) == int(at[1]) - 1
        saved = [line.split()[4] for line in evening.said(number) if line.startswith("the checkpoint of step")]
        assert saved in ([], [str(int(at[1]) - 1)])


def test_the_last_lines_are_the_result_and_what_to_do_next(evening: Evening) -> None:
    lines = evening.said(2)[-len(LAST) :]
    assert [line for line, known in zip(lines, LAST, strict=True) if not re.fullmatch(known, line)] == []


def test_the_table_fits_and_knows_its_last_step(evening: Evening) -> None:
    for text in evening.texts:
        assert "0/?" not in text and "Traceback" not in text
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", text)
        assert max(len(line) for line in plain.splitlines() if line.startswith("  ")) < COLUMNS
