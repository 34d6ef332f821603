"""Texts, files and bytes that are no YAML of a run: exit code 2, each problem a line, at once."""

import json
import os
from pathlib import Path

import pytest

from support.checks.broken_yamls import BASE, changed, check
from trinity.config import dump, load, parse
from trinity.config.schema.root import MonitorConfig

pytestmark = pytest.mark.core

_NINE = ", ".join(["*{0}"] * 9)
_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{_NINE.format(a)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
_DOUBLING = "a0: xxxxxxxx\n" + "".join(f"a{i + 1}: '{f'${{a{i}}}' * 8}'\n" for i in range(10))
TEXTS = [
    ("", "model.model_path: is empty"),
    ("null", "line 1: must be a mapping"),
    ("- a", "line 1: must be a mapping"),
    ("hello", "line 1: must be a mapping"),
    ("a:\n\tb: 3", "line 2: is not YAML"),
    ("a: [1, 2", "is not YAML"),
    ("a: {b: c", "is not YAML"),
    ("a: @b", "line 1: is not YAML"),
    ("a: *b", "line 1: is not YAML"),
    ("a: 'b", "is not YAML"),
    ("%YAML 3.0\n---\na: b", "line 1: is not YAML"),
    ("a: \x07", "line 1: is not YAML"),
    (BASE + "---\n" + BASE, "another document"),
    (BASE + "name: m\n", "name: is given twice, first on line 3"),
    (BASE + " batch_size: 9\n", "is not YAML"),
    (BASE + "trainer: {ulysses_sequence_parallel_size: 3, num_ranks: 4}\n", "does not divide trainer.num_ranks"),
    (BASE + "cluster: {node_num: 1, gpu_per_node: 2}\nexplorer: {rollout_model: {engine_num: 3}}\n", "more than"),
    (BASE + "cluster: {node_num: 1, gpu_per_node: 2}\ntrainer: {num_ranks: 3}\n", "trainer.num_ranks: is 3"),
    (BASE.replace("batch_size: 8", "batch_size: 8\n  batch_size: 9"), "buffer.batch_size: is given twice"),
    ("1: a", "line 1: has the key 1"),
    ("null: a", "line 1: has the key null"),
    ("true: a", "line 1: has the key true"),
    ("? [a]\n: b", "line 1: has the key"),
    ("? {a: b}\n: c", "line 1: has the key"),
    ("'': 3", "unknown key"),
    ("a.b: 3", "unknown key"),
    ("<<: 3", "line 1"),
    ("<<: {a: b}", "line 1: a: unknown key"),
    ("project: !!python/object/apply:os.system [ls]", "line 1: project: has the tag"),
    ("project: !foo bar", "line 1: project: has the tag !foo"),
    ("project: !!binary aGVsbG8=", "line 1: project: has the tag"),
    ("project: !!set {a, b}", "line 1: project: has the tag"),
    ("project: !!int abc", "must be a number"),
    ("a: " + "[" * 5000, "line 1: lists and mappings are nested"),
    ("a: " + "[" * 5000 + "]" * 5000, "line 1: lists and mappings are nested"),
    ("a: " + "{a: " * 5000 + "}" * 5000, "line 1: lists and mappings are nested"),
    ("a: " + "1" * 5000, "a number of 5000 characters"),
    ("a: 0." + "1" * 5000, "a number of 5002 characters"),
    ("a: &a\n  b: *a\n", "line 2: *a is inside"),
    ("stages: &a [*a]\n", "line 1: *a is inside"),
    ("a: &a\n  <<: *a\n", "line 2: *a is inside"),
    (_LAUGHS, "more than 5000 nodes"),
    (_DOUBLING + "project: ${a10}\n", "grows to"),
    ("".join(f"k{i}: 1\n" for i in range(20_000)), "more than 5000 nodes"),
    ("a: " + "x" * 600_000, "too large"),
    ("explorer:\n" + "".join(f"  k{i}: 1\n" for i in range(1000)), "unknown key"),
    (BASE + "explorer: {env_vars: {" + ", ".join(f"k{i}: 1" for i in range(1000)) + "}}\n", "and 950 more problems"),
    (BASE + '"\\e[31mred": 3\n', "\\x1b[31mred: unknown key"),
    (BASE + '"a\\nb": 3\n', "a\\nb: unknown key"),
    (BASE + "? " + "k" * 300_000 + "\n: 3\n", "kk ... kk"),
    (BASE + "mode: " + "v" * 300_000 + "\n", "300002 characters"),
    (BASE + "stages: [" + ", ".join(f"{{stage_name: s{i}}}" for i in range(1500)) + "]\n", "at most 100"),
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(("text", "said"), TEXTS, ids=[text[:30] for text, _ in TEXTS])
def test_a_text_that_is_no_configuration_is_refused(text: str, said: str, written: Path) -> None:
    written.write_text(text)
    found = check(written)
    assert said in found
    assert "\x1b" not in found
    assert found.count("\n") <= 51, "each problem is one line"
    assert len(max(found.splitlines(), key=len)) < len(str(written)) + 1500


def test_bytes_of_the_environment_and_the_command_line_that_are_no_text(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BYTES", "a\udcffb")
    written.write_text(changed("model.model_path", "'${oc.env:BYTES}'"))
    assert "line 4: model.model_path: has '\\udcff', which is no UTF-8 text" in check(written)
    written.write_text(BASE)
    assert "project" in check(written, "project=a\udcffb")
    assert "is no override" in check(written, "x." * 500 + "y=1")


def test_a_path_among_the_overrides_is_told_its_options(written: Path) -> None:
    written.write_text(BASE)
    hint = "; a YAML is --config FILE, a run's folder --job FOLDER"
    assert f"is no override; write key.path=value{hint}" in check(written, str(written))
    assert hint not in check(written, "a_word")


def test_what_looks_like_an_interpolation_and_is_text_reaches_the_services(written: Path) -> None:
    """Services read what `trinity run` writes: with everything filled in, once."""
    text = r"$\{no.such.key} costs 3 \\${x}"
    written.write_text(BASE + "monitor: {monitor_type: wandb, monitor_args: {notes: '" + r"\${no.such.key}" + "'}}\n")
    given = load(written)
    assert given.monitor.monitor_args == {"notes": "${no.such.key}"}
    for notes in ("${no.such.key}", text, "\\${a}", "\\\\${a}", "${" * 50):
        changed_config = given.model_copy(
            update={"monitor": MonitorConfig(monitor_type="wandb", monitor_args={"notes": notes})}
        )
        again = parse(json.dumps(dump(changed_config)), plugins_loaded=False)
        assert again.monitor.monitor_args == {"notes": notes}


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, content, said in (
        ("bytes", bytes(range(256)), "is not UTF-8 text"),
        ("utf16", BASE.encode("utf-16"), "is not UTF-8 text"),
        ("latin", b"project: \xe9", "is not UTF-8 text (byte 9)"),
        ("zeros", bytes(100), "line 1: is not YAML"),
        ("large", b"#" * 2**20, "too large"),
    ):
        (tmp_path / name).write_bytes(content)
        assert said in check(tmp_path / name)
    for name, said in ((".", "is no file"), ("fifo", "is no file"), ("none", "no such file"), ("x" * 300, "too long")):
        assert said in check(tmp_path / name)
