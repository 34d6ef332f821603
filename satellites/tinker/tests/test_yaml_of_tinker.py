"""The YAML of `trinity tinker`: the example is read, and mistakes are named with key, line and fix."""

import re
from pathlib import Path

import pytest

from trinity.config import ConfigError
from trinity.tinker.config import load_tinker

pytestmark = pytest.mark.core


def test_the_example_is_read(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    config = load_tinker(repository / "examples/tinker/quickstart.yaml", ["port=9000", "tenants=[a]"])
    assert (config.port, config.tenants, config.dtype) == (9000, ["a"], "float32")
    assert config.folder == tmp_path / "tinker/quickstart"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model_path: m\n", "tenants: is required"),
        ("tenants: [a]\n", "model_path: is required"),
        ("model_path: m\ntenants: []\n", "line 2: tenants: is a list, must not be empty"),
        ("model_path: m\ntenants: a\n", "line 2: tenants: is 'a', must be a list of texts"),
        ("model_path: m\ntenants: [a, b, a]\n", "names a tenant twice"),
        ("model_path: m\ntenants: ['../a']\n", "tenants.0: is '../a', must match ^[A-Za-z0-9]"),
        ("model_path: m\ntenants: [a]\nrank: 4\n", "rank: unknown key; did you mean 'max_rank'?"),
        ("model_path: m\ntenants: [a]\nport: 0\n", "port: is 0, must be greater than or equal to 1"),
        ("model_path: m\ntenants: [a]\nport: 70000\n", "port"),
        ("model_path: m\ntenants: [a]\ndtype: float16\n", "dtype: is 'float16', must be one of float32, bfloat16"),
        ("model_path: m\ntenants: [a]\naddress: example.org\n", "address"),
        ("model_path: m\ntenants: [a]\nname: ../up\n", "name"),
        ("model_path: m\ntenants: [a]\nresult_hours: 0\n", "result_hours"),
    ],
)
def test_mistakes_are_named(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "tinker.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_tinker(path)
