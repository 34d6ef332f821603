"""The commands under "Your own data to a served model" of both READMEs, typed: from a model folder and a JSONL to an
answer, and the same run without a YAML.

The model has random weights, and answers are single digits, which its long random replies hit now and then: enough for
rewards that differ, so that the step changes the weights.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.programs.terminal import Screen, Terminal

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1500)]

TITLES = {"README.md": "## Your own data to a served model", "README.zh.md": "## 从自己的数据到可用的模型"}
WITHOUT_YAML = re.compile(r"`(trinity run --model [^`]+)`")
SUMS = [(a, b) for a in range(1, 5) for b in range(1, 6)][:16]


@dataclass
class Hour:
    """What each command left."""

    folder: Path
    init: Screen
    run: list[str]
    view: str
    answer: str
    serve: Screen
    without_yaml: list[str]


def section(readme: Path) -> str:
    return readme.read_text().split(f"{TITLES[readme.name]}\n")[1].split("\n## ")[0]


def commands_of(readme: Path) -> list[str]:
    """Returns the commands of the section's block of code; a line that ends with a backslash goes on."""
    block = re.findall(r"^```\n(.*?)^```$", section(readme), re.MULTILINE | re.DOTALL)[0]
    return block.replace("\\\n", " ").splitlines()


@pytest.fixture(scope="module")
def hour(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Hour:
    if shutil.which("curl") is None:
        pytest.skip("no curl: `apt-get install curl`")
    folder = tmp_path_factory.mktemp("five")
    row = re.findall(r'`(\{"question".*?\})`', section(repository / "README.md"))[0]
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in SUMS]
    assert json.loads(row).keys() == rows[0].keys()
    (folder / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "my-model").symlink_to(quickstart_model)
    (folder / ".venv").symlink_to(sys.prefix)
    init, run, view, serve, curl = commands_of(repository / "README.md")
    without_yaml = WITHOUT_YAML.findall(section(repository / "README.md"))[0]

    with Terminal(["bash", "-c", init], folder, 160) as terminal:
        for question in (r"Column of the prompts \[question\]: ", r"Column of the right answers \[answer\]: "):
            terminal.expect(question, 60)
            terminal.type("\n")
        assert terminal.ended(300) == 0, terminal.text
        begun = terminal.screen()
    trained = _lines(run, folder, 600)
    viewed = "\n".join(_lines(view, folder, 120))
    with Terminal(["bash", "-c", f"exec {serve}"], folder, 160) as terminal:
        terminal.expect(r"serving http://127\.0\.0\.1:8010/v1", 300)
        answer = "\n".join(_lines(curl, folder, 120))
        terminal.interrupt()
        assert terminal.ended(60) in (0, 130), terminal.text
        served = terminal.screen()
    again = _lines(f".venv/bin/{without_yaml}", folder, 600)
    return Hour(folder, begun, trained, viewed, answer, served, again)


def _lines(command: str, folder: Path, seconds: float) -> list[str]:
    """The lines that a command prints to a pipe. It must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=seconds)  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
    return (done.stdout + done.stderr).splitlines()


def test_both_readmes_type_the_same(repository: Path) -> None:
    english, chinese = (commands_of(repository / name) for name in TITLES)
    assert english == chinese and len(english) == 5
    assert [re.split(r"\s+", line)[1] for line in english[:4]] == ["init", "run", "view", "serve"]
    assert len({*WITHOUT_YAML.findall(section(repository / "README.md"))}) == 1
    assert [WITHOUT_YAML.findall(section(repository / name)) for name in TITLES][1] == WITHOUT_YAML.findall(
        section(repository / "README.md")
    )


def test_init_shows_a_row_and_what_it_chose_and_checks_the_machine(hour: Hour) -> None:
    text = "\n".join(hour.init.lines)
    assert f"sums.jsonl: {len(SUMS)} row(s); the first:" in text
    assert '  question: "1+1"' in text and "grpo (accuracy_reward compares" in text
    assert "next: trinity run mine.yaml" in text
    assert "#" in (hour.folder / "mine.yaml").read_text()


@pytest.mark.parametrize("name", ["run", "without_yaml"])
def test_run_trains_and_ends_with_what_makes_sense_next(hour: Hour, name: str) -> None:
    lines: list[str] = getattr(hour, name)
    assert all(len(line) < 160 for line in lines), [line for line in lines if len(line) >= 160]
    assert re.search(r"the run is finished in \d+:\d\d: reward 0\.\d+", "\n".join(lines))
    model = hour.folder / re.search(r"model: (\S+) \(step \d+\)", "\n".join(lines))[1]  # type: ignore[index]
    before, after = (load_file(one / "model.safetensors") for one in (hour.folder / "my-model", model))
    assert before.keys() == after.keys() and any((before[key] != after[key]).any() for key in before)
    begin = next(n for n, line in enumerate(lines) if line.endswith(" next:")) + 1
    assert [line.split(" trinity ")[1].split()[0] for line in lines[begin : begin + 3]] == ["ui", "serve", "convert"]


def test_view_shows_ten_of_the_worst_replies(hour: Hour) -> None:
    head, names, *rows = hour.view.splitlines()
    assert head.startswith("step 1: 10 of ") and "reward" in names and len(rows) == 10
    assert {row.split()[3] for row in rows} == {"0.000"}


def test_curl_gets_an_answer_of_the_trained_model(hour: Hour) -> None:
    answer = json.loads(hour.answer)
    assert answer["model"] == "mine" and answer["usage"]["prompt_tokens"] == len("28+17") + 3
    assert isinstance(answer["choices"][0]["message"]["content"], str) and answer["usage"]["completion_tokens"] > 0
    shown = "\n".join(hour.serve.lines)
    assert "following the checkpoints in" in shown and "Ctrl-C ends it" in shown


def test_without_a_yaml_the_job_folder_has_it(hour: Hour) -> None:
    yaml = hour.folder / "checkpoints/trinity/sums-my-model/run.yaml"
    assert yaml.is_file() and any(str(yaml) in line for line in hour.without_yaml)
