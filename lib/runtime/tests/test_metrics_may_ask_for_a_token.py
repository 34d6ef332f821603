"""/metrics with a token file: a 401 without a token of it, the metrics with one, and the file is read again."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from trinity.runtime import metrics
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def _get(port: int, authorization: str = "") -> tuple[int, str]:
    headers = {"Authorization": authorization} if authorization else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_come_with_the_token_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret-token\n")
    port = metrics.serve("127.0.0.1", 0, file)
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer secret",
        "Basic secret-token",
        "Bearer secret-token2",
        "Bearer \xe9",
    ):
        code, text = _get(port, wrong)
        assert (code, "trinity_rpc_seconds" in text) == (401, False), wrong
    code, text = _get(port, "Bearer secret-token")
    assert (code, "trinity_rpc_seconds" in text) == (200, True)


def test_a_replaced_token_is_the_only_one_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    port = metrics.serve("127.0.0.1", 0, file)
    assert _get(port, "Bearer old")[0] == 200
    file.write_text("new\n")
    assert [_get(port, f"Bearer {key}")[0] for key in ("old", "new")] == [401, 200]
    file.unlink()
    assert _get(port, "Bearer new")[0] == 401, "without its file it lets no request through"


def test_without_a_file_metrics_are_open() -> None:
    assert _get(metrics.serve("127.0.0.1", 0))[0] == 200


@pytest.mark.parametrize(("content", "problem"), [(None, "cannot be read"), ("\n  \n", "has no key")])
def test_a_file_without_a_token_is_refused_by_name(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidInput, match=f"metrics_token_file.*{problem}"):
        metrics.serve("127.0.0.1", 0, file)
