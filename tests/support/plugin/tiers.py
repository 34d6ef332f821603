"""Tiers of the suite, as a pytest plugin.

`core` is what `make test` runs. `extended` is the rest; CI adds one fifth of it to each commit. A test without exactly
one of the two markers fails the collection. The unit of scheduling is a file, or all files that share an engine.
tests/durations.json says how long each file takes on two quiet cores; it balances workers and fifths. A run of the core
writes how much longer it took into build/slowness, so that `--minutes` knows which files a slow machine has time for.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from support.plugin.quarantine import QUARANTINED

TIERS = ("core", "extended")
FIFTHS = 5
ROOT = Path(__file__).parents[3]
DURATIONS = ROOT / "tests/durations.json"
SLOWNESS = ROOT / "build/slowness"
MEASURED_SECONDS = 600.0  # recorded seconds of core files that measure a machine
UNKNOWN_SECONDS = {"core": 3.0, "extended": 30.0}  # of a file that was not timed yet
GROWTH, GROWTH_SECONDS = 4 / 3, 5.0  # a file that takes a third longer is named, unless it is a matter of seconds

Durations = dict[str, dict[str, float]]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--fifth", type=int, choices=range(1, FIFTHS + 1), help="of the extended tests only this fifth")
    group.addoption("--minutes", type=float, help="skip files for which this machine needs more time than this")
    group.addoption("--list-fifths", action="store_true", help="print the files of each fifth; with --collect-only")
    group.addoption("--write-durations", action="store_true", help="write tests/durations.json for the files that ran")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files whose tests are all in the other tier: importing them takes each worker many seconds."""
    by_fifths = config.option.fifth or config.option.list_fifths
    wanted = "extended" if by_fifths else config.option.markexpr
    if wanted not in TIERS or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    named = {tier for tier in TIERS if f"mark.{tier}" in text}
    return True if named and wanted not in named else None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileTimes(config), "file-times")


class GroupScheduling(LoadScopeScheduling):
    """Each worker gets whole files, whose tests share slow fixtures. One worker gets all files that share an engine.

    pytest-xdist's own `loadgroup` has no effect under pytest 9.2: it renames tests by an attribute that is gone.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


@cache
def group_of(file: str) -> str:
    """The file itself, or `engine` if it uses the engine of its worker (support.servers.shared_engine)."""
    path = ROOT / file
    return "engine" if path.is_file() and "ENGINE_TESTS" in path.read_text() else file


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    check_tiers(items)
    for item in items:
        item.user_properties.append(("tier", tier_of(item)))
        if reason := QUARANTINED.get(item.nodeid):
            item.add_marker(pytest.mark.xfail(reason=f"quarantined: {reason}", strict=False))
    seconds = _seconds_of_groups(items, read_durations())
    if config.option.list_fifths or config.option.fifth:
        extended = {group: seconds[group] for item in items if tier_of(item) == "extended" for group in [_group(item)]}
        fifths = split_evenly(extended, FIFTHS)
        if config.option.list_fifths:
            _print_fifths(fifths, extended)
        if number := config.option.fifth:
            chosen = set(fifths[number - 1])
            kept = [item for item in items if tier_of(item) == "extended" and _group(item) in chosen]
            config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
            items[:] = kept
    if config.option.minutes is not None:
        slowness = float(SLOWNESS.read_text()) if SLOWNESS.exists() else 1.0
        needed = {group: seconds[group] * slowness for group in {_group(item) for item in items}}
        fitting = those_that_fit(needed, _workers(config), 60 * config.option.minutes)
        for item in items:
            if (group := _group(item)) not in fitting:
                reason = f"{group} takes about {needed[group]:.0f} s here, of {config.option.minutes:.0f} minutes"
                item.add_marker(pytest.mark.skip(reason=reason))
    if hasattr(config, "workerinput"):  # the longest first: no worker is left with a long one at the end
        items.sort(key=lambda item: (-seconds[_group(item)], _group(item)))


def check_tiers(items: Iterable[pytest.Item]) -> None:
    """Raises UsageError naming the tests that are in no tier, or in two."""
    wrong = sorted({_file(item) for item in items if len(_tiers(item)) != 1})
    if wrong:
        raise pytest.UsageError(
            f"every test needs exactly one of the markers {' and '.join(TIERS)} (pytestmark, or at the test): "
            + ", ".join(wrong)
        )


def tier_of(item: pytest.Item) -> str:
    return _tiers(item)[0]


def _tiers(item: pytest.Item) -> list[str]:
    """The nearest tier wins: a test of a `core` file may be `extended`."""
    for node in reversed(item.listchain()):
        if own := [tier for tier in TIERS if any(mark.name == tier for mark in node.own_markers)]:
            return own
    return []


def split_evenly(seconds: Mapping[str, float], parts: int) -> list[list[str]]:
    """Names in `parts` lists of about the same sum; each name is in exactly one. The longest are placed first."""
    lists: list[list[str]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        shortest = sums.index(min(sums))
        lists[shortest].append(name)
        sums[shortest] += seconds[name]
    return lists


def those_that_fit(seconds: Mapping[str, float], workers: int, limit: float) -> set[str]:
    """Names that `workers` can finish within `limit` seconds. The longest are placed first, as in a run."""
    ends, fitting = [0.0] * workers, set()
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        first = ends.index(min(ends))
        if ends[first] + seconds[name] <= limit:
            ends[first] += seconds[name]
            fitting.add(name)
    return fitting


def _workers(config: pytest.Config) -> int:
    return int(getattr(config, "workerinput", {}).get("workercount", 1))


def read_durations() -> Durations:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


class FileTimes:
    """Adds up what each file took, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._took: defaultdict[tuple[str, str], float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = dict(report.user_properties).get("tier")
        if tier is None:  # of xdist, for a test whose worker died
            return
        self._took[tier, report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._took:
            return
        known = read_durations()
        terminalreporter.section("slowest ten files")
        for (tier, file), took in sorted(self._took.items(), key=lambda entry: -entry[1])[:10]:
            before = known.get(tier, {}).get(file)
            terminalreporter.write_line(f"{took:7.1f} s  {file}" + (f"  (was {before:.1f} s)" if before else ""))
        for file, took, before in grown(self._took, known):
            terminalreporter.write_line(f"grown by a third or more: {file}, {before:.1f} -> {took:.1f} s")
        if (ratio := slowness(self._took, known)) is not None:
            SLOWNESS.parent.mkdir(exist_ok=True)
            SLOWNESS.write_text(f"{ratio:.2f}\n")
        if self._config.option.write_durations:
            _write_durations(known, self._took)


def grown(took: Mapping[tuple[str, str], float], known: Durations) -> Iterator[tuple[str, float, float]]:
    """(file, seconds, seconds before) of files that take a third longer than the committed seconds."""
    for (tier, file), seconds in sorted(took.items()):
        before = known.get(tier, {}).get(file)
        if before is not None and seconds > before * GROWTH and seconds - before > GROWTH_SECONDS:
            yield file, seconds, before


def slowness(took: Mapping[tuple[str, str], float], known: Durations) -> float | None:
    """Seconds that core files took, of the committed seconds; None if only a part of the core ran."""
    files = {file: before for file, before in known.get("core", {}).items() if ("core", file) in took}
    if (recorded := sum(files.values())) < MEASURED_SECONDS:
        return None
    return sum(took["core", file] for file in files) / recorded


def _write_durations(known: Durations, took: Mapping[tuple[str, str], float]) -> None:
    """Files that did not run keep their figures, unless they are gone."""
    merged = {tier: dict(known.get(tier, {})) for tier in TIERS}
    for (tier, file), seconds in took.items():
        merged[tier][file] = round(seconds, 1)
    there = {tier: {f: s for f, s in sorted(files.items()) if (ROOT / f).exists()} for tier, files in merged.items()}
    DURATIONS.write_text(json.dumps(there, indent=1) + "\n")


def _seconds_of_groups(items: Iterable[pytest.Item], known: Durations) -> dict[str, float]:
    files = defaultdict(set)
    for item in items:
        files[_group(item)].add((tier_of(item), _file(item)))
    return {
        group: sum(known.get(tier, {}).get(file, UNKNOWN_SECONDS[tier]) for tier, file in of_group)
        for group, of_group in files.items()
    }


def _print_fifths(fifths: list[list[str]], seconds: Mapping[str, float]) -> None:
    for number, groups in enumerate(fifths, 1):
        print(f"fifth {number}: {sum(seconds[group] for group in groups):.0f} s")
        for group in groups:
            print(f"  {seconds[group]:6.1f} s  {group}")


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else item.path.name


def _group(item: pytest.Item) -> str:
    return group_of(_file(item))
