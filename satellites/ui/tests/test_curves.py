"""Curves of metrics: read once, bounded, with their extremes, and in the page before any request of a script."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from support.fakes.pages.recorded_run import make_job
from trinity.reading.series import BUSY, Curves
from trinity.ui import curves
from trinity.ui.app import make_app
from trinity.ui.charts import Axis, Span, StepAxis, scale
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"


def write(job: Path, role: str, *lines: dict[str, Any], mode: str = "w") -> None:
    with (job / f"monitor/{role}.jsonl").open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def values(found: Curves, name: str, most: int = 400, first: int = 0, last: int = 10**18) -> dict[int, float]:
    steps, _, points = found.points(name, first, last, most)
    return {int(step): value for step, value in zip(steps, points, strict=True)}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return make_job(tmp_path / "job")


def test_a_step_that_is_trained_again_has_its_last_values_and_appended_lines_are_read(job: Path) -> None:
    write(job, "trainer", *({"step": step, "time": 100.0 + step, "a": float(step)} for step in (1, 2, 3)))
    found = Curves(job)
    assert values(found, "a") == {1: 1, 2: 2, 3: 3}
    write(job, "trainer", {"step": 3, "time": 110.0, "a": 7.5}, {"step": 4, "time": 111.0, "a": 8.0}, mode="a")
    write(job, "explorer", {"step": 0, "time": 99.0, "eval/x/accuracy/mean@1": 0.5})
    assert values(found, "a") == {1: 1, 2: 2, 3: 7.5, 4: 8}
    assert values(found, "eval/x/accuracy/mean@1") == {0: 0.5}
    assert found.points("a", 0, 10, 10)[1] == [2.0, 3.0, 11.0, 12.0], "seconds since the first line of any process"
    write(job, "trainer", {"step": 1, "a": 4.0})
    assert values(found, "a") == {1: 4}, "another file in its place"


def test_a_long_curve_keeps_its_extremes_and_a_part_of_it_every_step(job: Path) -> None:
    write(job, "trainer", *({"step": step, "a": 50.0 if step == 7_013 else step % 3} for step in range(1, 10_001)))
    found = Curves(job)
    whole = values(found, "a", most=100)
    assert len(whole) <= 100 and whole[7_013] == 50 and min(whole.values()) == 0
    assert min(whole) < 10 and max(whole) > 9_990
    assert len(values(found, "a", first=7_000, last=7_050)) == 51


def test_what_cannot_be_drawn_is_left_out(job: Path) -> None:
    lines = [{"step": 1, "a": float("nan"), "text": "x"}, {"step": 2, "a": float("inf")}, {"step": 3, "a": 1.0}]
    write(job, "trainer", *lines)
    with (job / "monitor/trainer.jsonl").open("a") as file:
        file.write('{"step": "x", "a": 1}\nnothing\n[1]\n{"a": 2}\n{"step": 4, "a": 3')
    found = Curves(job)
    assert values(found, "a") == {3: 1}
    assert found.points("none", 0, 9, 9) == [[], [], []]
    assert Curves(None).names() == Curves(job / "none").names() == []


def test_the_share_of_working_time_is_computed(job: Path) -> None:
    write(job, "trainer", {"step": 1, "time/step": 3.0, "time/wait": 1.0}, {"step": 2, "time/wait": 1.0})
    assert values(Curves(job), BUSY) == {1: 0.75}


def test_a_page_opens_with_one_curve_of_each_kind() -> None:
    names = ["actor/entropy", "actor/pg_loss", "actor/ppo_kl", "eval/a/accuracy/mean@1", "eval/a/reward/mean@1",
             "eval/b/accuracy/mean@4", "perf/gpu_use/0", "perf/gpu_use/3", "rollout/reward/mean", "sample/reward_mean",
             "time/save", BUSY]  # fmt: skip
    assert curves.opened(names) == [
        "sample/reward_mean", "eval/a/accuracy/mean@1", "eval/b/accuracy/mean@4", "actor/ppo_kl", "actor/entropy",
        "actor/pg_loss", "perf/gpu_use/0", "perf/gpu_use/3", BUSY,
    ]  # fmt: skip
    many = [f"eval/{number}/accuracy/mean@1" for number in range(9)] + [f"perf/gpu_use/{n}" for n in range(16)]
    assert curves.opened(many) == [*many[:4], *many[9:17]]


def test_the_page_holds_its_curves_and_others_are_asked_for(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(job.parent))
    evil = "</div><script>alert(1)</script>"
    write(job, "trainer", *({"step": step, "time": 1.0, "sample/reward_mean": step / 4, evil: 2.0} for step in (1, 2)))
    with TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1") as client:
        client.get(f"/?key={KEY}")
        page = client.get("/run/job").text
        held = json.loads(html.unescape(re.findall(r'data-run="/run/job/curves"[^>]*>(.*?)</div>', page)[0]))
        assert "<script>alert" not in page
        assert held == {"names": [evil, "sample/reward_mean"],
                        "series": {"sample/reward_mean": [[1, 2], [0, 0], [0.25, 0.5]]}}  # fmt: skip
        asked = client.get("/run/job/curves", params={"name": [evil, "none"], "first": 2}).json()["series"]
        assert asked == {evil: [[2], [0], [2]]}
        for wrong in ("name=a&" * 25, "first=x"):
            assert "problem" in client.get(f"/run/job/curves?{wrong}").json()
        assert client.get("/run/none/curves").status_code == 404
        write(job, "trainer", *({"step": step, "sample/reward_mean": step % 7} for step in range(1, 10_001)))
        assert len(client.get("/run/job").content) < 40_000, "a long run's page is no larger"


def test_a_pause_is_drawn_short_but_not_work() -> None:
    day = 86_400.0
    spans = [Span("waited", 10.0 * step, 10.0 * step) for step in range(20)]
    spans += [Span("waited", day + 10.0 * step, day + 10.0 * step) for step in range(20)]
    axis = Axis(spans)
    assert axis.pauses == [day - 190] and axis.seconds == 380
    assert axis.at(0) == 0 and axis.at(day + 190) == 100
    assert 45 < axis.at(190) < 50 < axis.at(day) < 55, "both sittings have their half"
    assert Axis(spans, [Span("alive", 0, 2 * day)]).pauses == []
    assert Axis([]).at(3.0) == 0 and Axis([Span("alive", 5.0, 5.0)]).at(5.0) == 0
    assert Axis([Span("a", float("nan"), float("inf")), Span("a", 1.0, 3.0)]).at(2.0) == 50


def test_steps_are_equally_wide_whatever_lies_between_them() -> None:
    day = 86_400.0
    ends = [(3, 10.0), (4, 12.0), (5, 3 * day), (6, 3 * day + 1)]
    axis = StepAxis([Span("sampled", 0.0, 3 * day + 5)], ends)
    assert [axis.at(end) for _, end in ends] == [20, 40, 60, 80], "and one such place for what came after the last"
    assert (axis.at(0.0), axis.at(11.0), axis.at(3 * day + 5)) == (0, 30, 100)
    assert axis.ticks() == [(10, "3"), (30, "4"), (50, "5"), (70, "6")]
    assert [text for _, text in StepAxis([], [(step, float(step)) for step in range(1, 101)]).ticks()] == [
        "1", "14", "27", "40", "53", "66", "79", "92"
    ]  # fmt: skip
    nothing_after = StepAxis([Span("sampled", 1.0, 2.0)], [(1, 2.0)])
    assert (nothing_after.at(1.0), nothing_after.at(2.0)) == (0, 100)
    again = StepAxis([], [(1, 5.0), (2, 3.0), (3, 9.0)])  # the clock went back
    assert again.at(4.0) <= again.at(6.0) <= again.at(8.0)


def test_an_axis_in_time_has_the_clock_below_it() -> None:
    texts = [text for _, text in Axis([Span("alive", 1.7e9, 1.7e9 + 60)]).ticks()]
    assert len(texts) == 3 and all(len(text) == len("01:02:03") for text in texts)
    days = [text for _, text in Axis([Span("alive", 1.7e9, 1.7e9 + 200_000)]).ticks()]
    assert all(len(text) == len("2023-11-14 01:02:03") for text in days)
    assert str(scale(Axis([Span("alive", 1.0, 61.0)]))).count("<text") == 3
    assert Axis([]).ticks() == []
