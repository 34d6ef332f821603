"""`trinity check` on auxiliary models that are served elsewhere: each mistake is one sentence, which shows no key."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from support.checks.broken_yamls import BASE, check
from trinity.cli.main import app
from trinity.config import dump, load

pytestmark = pytest.mark.core

URL = "https://api.example.com/v1"


class Refusing(BaseHTTPRequestHandler):
    """Answers each question with an error, as a server does that was sent no key."""

    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Nothing: what the command writes is looked at."""


@pytest.fixture
def answering() -> Iterator[str]:
    """The address of a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def write(folder: Path, external: dict[str, Any], **model: Any) -> Path:
    """The valid YAML, with a judge elsewhere that grades its tasks."""
    document = yaml.safe_load(BASE)
    document["checkpoint_root_dir"] = str(folder / "checkpoints")
    taskset = document["buffer"]["explorer_input"]["taskset"]
    taskset |= {"path": str(folder / "data.jsonl"), "default_workflow_type": "math_ruler_workflow"}
    (folder / "data.jsonl").write_text(json.dumps({"prompt": "1+1", "response": "2"}) + "\n")
    given = {"model_path": "owner/judge", "external_model": external, **model}
    document |= {"explorer": {"auxiliary_models": [given]}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("external", "model", "said"),
    [
        ({"base_url": "ftp://host/v1"}, {}, "external_model.base_url: must be http://host"),
        ({"base_url": "api.example.com/v1"}, {}, "external_model.base_url: must be http://host"),
        ({"base_url": "http://host:99999/v1"}, {}, "external_model.base_url: must be http://host"),
        ({"base_url": "https://me:sk-secret@host/v1"}, {}, "external_model.base_url: holds a user or a query"),
        ({"base_url": "https://host/v1?key=sk-secret"}, {}, "external_model.base_url: holds a user or a query"),
        ({"base_url": URL, "api_key_env": "sk-secret"}, {}, "api_key_env: is no name of a variable; export the key"),
        ({"base_url": URL, "timeout_seconds": 0}, {}, "timeout_seconds: is 0, must be greater than 0"),
        ({"api_key_env": "JUDGE_KEY"}, {}, "external_model.base_url: is required"),
        ({"base_url": URL, "api_key": "sk"}, {}, "external_model.api_key: unknown key; did you mean 'api_key_env'"),
        ({"base_url": URL}, {"kind": "score"}, "auxiliary_models.0.kind: is score; an external model writes"),
        ({"base_url": URL}, {"engine_num": 2}, "auxiliary_models.0.engine_num: is for an engine; the model is served"),
    ],
)
def test_a_mistake_is_one_sentence_without_the_key(
    external: dict[str, Any], model: dict[str, Any], said: str, tmp_path: Path
) -> None:
    text = check(write(tmp_path, external, **model))
    assert said in text
    assert text.count("\n") == 1, text
    assert "sk-secret" not in text


def test_a_right_one_is_shown_and_takes_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    path = write(tmp_path, {"base_url": URL, "api_key_env": "JUDGE_KEY"}, name="judge")
    done = CliRunner().invoke(app, ["check", "--config", str(path), "cluster.gpu_per_node=2"])
    assert done.exit_code == 0, done.output
    assert f"judge: served at {URL}" in done.output
    assert "sk-secret" not in done.output
    recorded = json.dumps(dump(load(path)))
    assert "JUDGE_KEY" in recorded
    assert "sk-secret" not in recorded
    (tmp_path / "config.json").write_text(recorded)
    assert load(tmp_path / "config.json").explorer == load(path).explorer, "the processes of a run read it so"


@pytest.mark.parametrize(
    ("variable", "url", "changed", "said"),
    [
        ("", "http://127.0.0.1:1/v1", "name=sums", "base_url: http://127.0.0.1:1/v1 is not reachable: "),
        ("NOT_SET", "", "name=sums", "external_model.api_key_env: NOT_SET is not set; export it with the key"),
        ("", "", "workflow_args={reward_model: judge}", "explorer.auxiliary_models: are to score sums, and write text"),
    ],
)
def test_a_run_is_refused_before_it_starts(
    variable: str, url: str, changed: str, said: str, answering: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {"base_url": url or answering, "api_key_env": variable})
    taskset = "buffer.explorer_input.taskset"
    overrides = [f"{taskset}.default_workflow_type=math_workflow", f"{taskset}.{changed}", "buffer.batch_size=1"]
    done = CliRunner().invoke(app, ["check", "--deep", str(path), *overrides])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
