"""Every test is in one tier; five fifths are all extended tests; CONTRIBUTING.md lists quarantined tests."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.plugin import tiers
from support.plugin.quarantine import QUARANTINED
from support.plugin.tiers import FIFTHS, group_of, grown, slowness, split_evenly, those_that_fit

pytestmark = pytest.mark.core


def collect(folder: Path, source: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return run(folder, source, "--collect-only", *options)


def run(folder: Path, source: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Returns pytest's output, with the plugin, on a file with this text."""
    (folder / "test_it.py").write_text(source)
    plugins = ["-p", "support.plugin.tiers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q"]
    marks = ["-o", "markers=core\nextended", "-o", "addopts=", "--rootdir", str(folder), "--noconftest"]
    return subprocess.run(
        [*command, *marks, *options, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )


@pytest.mark.parametrize(
    "marks", ["", "pytestmark = [pytest.mark.core, pytest.mark.extended]\n"], ids=["no tier", "two tiers"]
)
def test_a_test_in_no_tier_or_in_two_is_not_collected(marks: str, tmp_path: Path) -> None:
    done = collect(tmp_path, f"import pytest\n{marks}\ndef test_it(): pass\n")
    assert done.returncode == 4, done.stdout
    assert "exactly one of the markers core and extended" in done.stderr and "test_it.py" in done.stderr


def test_the_nearest_marker_counts(tmp_path: Path) -> None:
    source = (
        "import pytest\npytestmark = pytest.mark.core\n\n"
        "@pytest.mark.extended\ndef test_long(): pass\n\ndef test_it(): pass\n"
    )
    fifths = [collect(tmp_path, source, "--fifth", str(number)).stdout for number in range(1, FIFTHS + 1)]
    assert sum("test_long" in fifth for fifth in fifths) == 1
    assert not any("::test_it" in fifth for fifth in fifths)


def test_a_file_of_the_other_tier_is_not_imported(tmp_path: Path) -> None:
    for tier in tiers.TIERS:
        (tmp_path / f"test_{tier}.py").write_text(f"import pytest\npytestmark = pytest.mark.{tier}\n")
    (tmp_path / "test_none.py").write_text("def test_it(): pass\n")

    def left_out(**options: object) -> list[str]:
        config = SimpleNamespace(option=SimpleNamespace(**{"fifth": None, "list_fifths": False, **options}))
        found = (path for path in tmp_path.iterdir() if tiers.pytest_ignore_collect(path, config))  # type: ignore[arg-type]
        return sorted(path.name for path in found)

    assert left_out(markexpr="core") == ["test_extended.py"]
    assert left_out(markexpr="", fifth=2) == left_out(markexpr="", list_fifths=True) == ["test_core.py"]
    assert left_out(markexpr="") == left_out(markexpr="core and not slow") == []


def test_fifths_are_everything_once_and_of_about_the_same_length() -> None:
    seconds = {f"file_{number}": float(number % 13 + 1) for number in range(60)}
    fifths = split_evenly(seconds, FIFTHS)
    assert sorted(name for fifth in fifths for name in fifth) == sorted(seconds)
    sums = [sum(seconds[name] for name in fifth) for fifth in fifths]
    assert max(sums) - min(sums) <= max(seconds.values())


def test_files_that_a_slow_machine_has_no_time_for_are_skipped_by_name(tmp_path: Path) -> None:
    seconds = {"longest": 900.0, "long": 500.0, "middle": 300.0, "short": 90.0, "shorter": 20.0}
    assert those_that_fit(seconds, 2, 3600) == set(seconds)
    assert those_that_fit(seconds, 2, 400) == {"middle", "short", "shorter"}
    assert those_that_fit(seconds, 1, 400) == {"middle", "short"}
    source = "import pytest\n@pytest.mark.extended\ndef test_long(): pass\n"
    chosen = [run(tmp_path, source, "-rs", "--minutes", minutes).stdout for minutes in ("0.01", "10")]
    assert "1 skipped" in chosen[0] and "test_it.py takes about" in chosen[0]
    assert "1 passed" in chosen[1]


def test_a_run_of_the_core_measures_the_machine() -> None:
    known = {"core": {"one.py": 400.0, "other.py": 300.0, "not run.py": 900.0}}
    took = {("core", "one.py"): 900.0, ("core", "other.py"): 500.0, ("extended", "third.py"): 7.0}
    assert slowness(took, known) == pytest.approx(2.0)
    assert slowness({("core", "one.py"): 900.0}, known) is None


def test_the_summary_of_a_run_keeps_how_slow_the_machine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SLOWNESS", tmp_path / "build/slowness")
    monkeypatch.setattr(tiers, "read_durations", lambda: {"core": {"one.py": 700.0}})
    times = tiers.FileTimes(SimpleNamespace(option=SimpleNamespace(write_durations=False)))  # type: ignore[arg-type]
    report = SimpleNamespace(user_properties=[("tier", "core")], nodeid="one.py::test_it", duration=1400.0)
    times.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    times.pytest_terminal_summary(SimpleNamespace(section=lambda _: None, write_line=lambda _: None))
    assert float((tmp_path / "build/slowness").read_text()) == 2.0


def test_a_file_that_takes_a_third_longer_is_named() -> None:
    took = {("core", "slower.py"): 40.0, ("core", "same.py"): 31.0, ("core", "short.py"): 2.0, ("core", "new.py"): 90.0}
    known = {"core": {"slower.py": 30.0, "same.py": 30.0, "short.py": 1.0}}
    assert [file for file, _, _ in grown(took, known)] == []
    assert [file for file, _, _ in grown({("core", "slower.py"): 41.0}, known)] == ["slower.py"]


def test_quarantined_tests_are_few_and_listed(repository: Path) -> None:
    text = (repository / "CONTRIBUTING.md").read_text()
    assert len(QUARANTINED) <= 5
    assert all(node in text for node in QUARANTINED)


def test_files_stay_whole_on_a_worker_and_those_with_an_engine_share_it(tmp_path: Path) -> None:
    """Otherwise each worker would make the run that a file's tests share."""
    engine = [
        "services/explorer/tests/engine/test_engine_on_real_vllm.py",
        "tests/integration/test_weights_on_real_vllm.py",
    ]
    assert [group_of(file) for file in [*engine, "cli/tests/supervise/test_join.py"]] == ["engine"] * 2 + [
        "cli/tests/supervise/test_join.py"
    ]
    source = "import os, pytest\npytestmark = pytest.mark.core\n" + "".join(
        f"def test_{n}(): open('{{}}', 'a').write(f'{{os.getpid()}}\\n')\n" for n in range(6)
    )
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(source.replace("{}", str(tmp_path / f"{name}.pids")))
    command = [sys.executable, "-m", "pytest", "-p", "support.plugin.tiers", "-p", "no:cacheprovider", "-q", "-n", "2"]
    options = ["--dist", "load", "-o", "markers=core\nextended", "-o", "addopts=", "--rootdir", str(tmp_path)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""}
    command += [*options, "--noconftest", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(set((tmp_path / f"{name}.pids").read_text().split())) for name in "ab"] == [1, 1]


FAILS = "import pytest\n\n@pytest.mark.parametrize('n', range(6))\ndef test_fails(n):\n    assert n == 'a b'\n"


@pytest.mark.parametrize(
    ("source", "files", "written"),
    [
        (FAILS, 5, [f"test_{file}.py::test_fails[{n}]" for file in range(5) for n in range(6)]),
        (FAILS, 6, None),
        ("def test_passes(): pass\n", 1, None),
        ("import gone\n", 1, None),
    ],
    ids=["five files", "more than five", "none", "not collected"],
)
def test_failed_tests_of_a_few_files_are_written_down_to_run_again(
    source: str, files: int, written: list[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "build").mkdir()
    file = tmp_path / "build/failed-tests"
    file.write_text("of an earlier run\n")
    for number in range(files):
        (tmp_path / f"test_{number}.py").write_text(source)
    options = ["-p", "support.plugin.failed_tests", "-p", "no:cacheprovider", "-o", "addopts=", "--noconftest", "-q"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )
    assert (file.read_text().splitlines() if file.exists() else None) == written
