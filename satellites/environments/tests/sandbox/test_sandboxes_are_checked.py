"""`trinity check --deep` refuses tasks and backends of `sandbox` by the field, with what helps."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.checks.deep_check import check, play
from trinity.environments.sandbox import runtimes
from trinity.environments.sandbox.environment import Shell
from trinity.environments.sandbox.sandbox import problem
from trinity.runtime.errors import InvalidInput

pytestmark = [pytest.mark.core, pytest.mark.skipif(bool(problem()), reason=f"no sandbox: {problem()}")]

HARBOR = Path(__file__).parent / "harbor_runtimes/package"


def checked(folder: Path, dockerfiles: list[str], **args: Any) -> tuple[int, str]:
    """Checks a folder of tasks, each with its Dockerfile."""
    for number, text in enumerate(dockerfiles):
        task = folder / f"tasks/task-{number}"
        for name in ("environment", "tests"):
            (task / name).mkdir(parents=True)
        (task / "instruction.md").write_text("Write 42 to answer.")
        (task / "task.toml").write_text("[environment]\nmemory_mb = 256\n")
        (task / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
        (task / "environment/Dockerfile").write_text(text)
    columns = {"prompt_key": "instruction", "response_key": "task"}
    return check(folder, {}, path=str(folder / "tasks"), format=columns, **play("sandbox", **args))


def test_run_lines_of_any_row_are_refused_where_no_image_is_built(tmp_path: Path) -> None:
    code, text = checked(tmp_path, ["FROM debian", "FROM debian\nRUN apt-get install jq"])
    said = "row 1, as sandbox reads it: task.environment: the Dockerfile has RUN apt-get install jq, which bubblewrap"
    assert (code, said in " ".join(text.split())) == (2, True), text


def test_a_backend_decides_which_rows_can_be_played() -> None:
    row = {
        "instruction": "Write 42 to answer.",
        "environment": [{"path": "Dockerfile", "text": "FROM debian\nRUN true"}],
        "tests": [{"path": "test.sh", "text": "true"}],
        "solution": [{"path": "solve.sh", "text": "true"}],
    }
    for play_row in (Shell.read_row, lambda *given: Shell.oracle(*given, seed=0)):
        for backend in ("docker", "e2b"):
            play_row(row, {"backend": backend})
        with pytest.raises(InvalidInput, match="RUN true, which bubblewrap cannot do"):
            play_row(row, {})
        with pytest.raises(InvalidInput, match=r"task\.config\.environment\.docker_image: is not there"):
            play_row(row, {"backend": "agent-sandbox"})
        play_row({**row, "config": {"environment": {"docker_image": "debian"}}}, {"backend": "agent-sandbox"})


def test_a_runtime_without_credentials_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HARBOR), *sys.path]))
    monkeypatch.setenv(runtimes.RUNTIMES_VARIABLE, '{"e2b": {}}')
    monkeypatch.setattr(runtimes, "_running", [])
    runtimes._require_harbor.cache_clear()
    code, text = checked(tmp_path, 2 * ["FROM debian"], backend="e2b")
    for one in runtimes._running:
        one._process.kill()
    said = "workflow_args.environment_args.backend: e2b starts no sandbox: E2B requires E2B_API_KEY to be set."
    assert (code, said in " ".join(text.split())) == (2, True), text
