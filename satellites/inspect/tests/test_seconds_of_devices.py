"""What `trinity cost` counts, out of hand-made events, step times and accounts."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from support.fakes.pages.recorded_run import ledger
from trinity.inspect.cost import app, render
from trinity.reading import wire
from trinity.reading.accounts import budget, device_log, fates, lives
from trinity.reading.accounts.fates import Groups
from trinity.reading.render import losses_text
from trinity.study import cost

pytestmark = pytest.mark.core


def write_events(stage: Path, *events: tuple[float, str, dict[str, Any]], supervisor: str = "main") -> None:
    path = device_log.folder_of(stage) / f"{supervisor}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"time": at, "event": event, **more}) + "\n" for at, event, more in events))


def of(name: str, devices: float = 1) -> list[tuple[float, str, dict[str, Any]]]:
    """It lives from 1 to 5 and, as another process, from 6 to 10."""
    return [
        (0.0, "began", {"name": name, "service": name, "devices": devices}),
        (1.0, "started", {"name": name, "pid": 11}),
        (5.0, "died", {"name": name, "pid": 11}),
        (6.0, "started", {"name": name, "pid": 12}),
        (10.0, "ended", {"name": name}),
    ]


def test_steps_that_were_trained_again_kills_and_gaps_add_up(tmp_path: Path) -> None:
    write_events(tmp_path, *of("trainer", devices=2))
    lines = [
        {"step": 1, "time": 3.5, "time/step": 1.0, "time/wait": 0.5, "time/publish": 0.25},
        {"step": 1, "time": 8.0, "time/step": 1.0, "time/wait": 0.25},
        {"step": 2, "time": 9.5, "time/step": 1.0, "time/save": 0.5},
    ]
    damaged = ['{"step": 2, "ti', '{"step": 1, "time": 3.6, "eval/accuracy": 1.0}', "[" * 9999]
    (tmp_path / "monitor/trainer.jsonl").write_text("\n".join([*map(json.dumps, lines), *damaged]))
    (watch,) = lives.read(tmp_path)
    assert (watch.seconds, watch.kills) == (20.0, 1)
    found = fates.of_watch(watch, tmp_path, fates.read_steps(tmp_path))
    expected = {"trained": 4.0, "recomputed": 2.0, "idle": 1.5, "publishing": 0.5, "saving": 1.0, "aborted": 3.0,
                "starting": 2 * (1.0 + 0.75 + 0.75), "restarting": 2.0}  # fmt: skip
    assert {fate: seconds for fate, seconds in found.items() if fate != "other" and seconds} == expected
    assert sum(found.values()) == pytest.approx(watch.seconds)


def test_what_ends_of_the_trainer_cost_is_summed_by_cause(tmp_path: Path) -> None:
    lost = "node gpu-2 is lost: it has been silent for 8 s\x1b[2J"
    events = [(0.0, "began", {"name": "trainer", "service": "trainer", "devices": 4})]
    for at, why in ((10.0, lost), (30.0, "rank 1 ended with code -9; see its log"), (50.0, lost)):
        events.append((at - 9, "started", {"name": "trainer", "pid": int(at)}))
        events.append((at, "died", {"name": "trainer", "pid": int(at), "reason": why}))
    write_events(tmp_path, *events, (52.0, "started", {"name": "trainer", "pid": 52}), (60.0, "beat", {}))
    lines = [
        {"step": 1, "time": 4.0, "time/step": 1.0},
        {"step": 2, "time": 6.0, "time/step": 1.5},  # cut off 4 s later; trained again
        {"step": 2, "time": 25.0, "time/step": 2.0},  # the process starts for 2 s
        {"step": 3, "time": 45.0, "time/step": 1.0},  # 3 s
        {"step": 4, "time": 58.0, "time/step": 1.0},  # 5 s
    ]
    (tmp_path / "monitor/trainer.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = fates.losses(lives.read(tmp_path), fates.read_steps(tmp_path))
    first, second, third = 4 + 1.5 + 11 + 2, 5 + 11 + 3, 5 + 2 + 5
    assert [(one["count"], one["seconds"]) for one in found] == [(2, first + third), (1, second)]
    assert cost.account("a/b", cost.measure(tmp_path), Groups(), {})["ettr"] == pytest.approx(1 - (30.5 + 19) / 60)
    text = losses_text(found)
    assert text[0].startswith("30 s lost, 2 time(s): node gpu-2 is lost: it has been silent for 8 s")
    assert "\x1b" not in text[0]


def test_the_loss_of_a_machine_is_counted_once_and_against_the_time_of_the_run(tmp_path: Path) -> None:
    first = [(5.0, "died", {"reason": "node gpu-2 is lost"}), (9.0, "started", {}), (20.0, "ended", {})]
    other = [(4.0, "died", {"reason": "killed by SIGKILL"}), (7.0, "started", {}), (20.0, "ended", {})]
    for name, events in (("trainer", first), ("trainer-gpu-2", other)):
        begin = [(0.0, "began", {"service": "trainer", "devices": 2}), (0.0, "started", {})]
        own = [(at, event, {"name": name, "pid": 1, **more}) for at, event, more in [*begin, *events]]
        write_events(tmp_path, *own, supervisor=name)
    steps = [{"step": 1, "time": 3.0, "time/step": 1.0}, {"step": 2, "time": 12.0, "time/step": 1.0}]
    (tmp_path / "monitor/trainer.jsonl").write_text("\n".join(map(json.dumps, steps)))
    found = cost.account("a/b", cost.measure(tmp_path), Groups(), {})
    assert found["losses"] == [{"cause": "node gpu-2 is lost", "count": 1, "seconds": 2.0 + 4.0 + 2.0}]
    assert found["ettr"] == pytest.approx(1 - 8 / 20)


def test_a_killed_supervisor_costs_what_passes_until_its_successor_trains(tmp_path: Path) -> None:
    """It writes no end. A command that ended in order costs nothing, however much later the run is resumed."""
    began = {"name": "trainer", "service": "trainer", "devices": 1}
    started = {"name": "trainer", "pid": 7}
    killed = [(0.0, "began", began), (1.0, "started", started), (9.0, "beat", {})]
    resumed = [(20.0, "began", began), (21.0, "started", started), (40.0, "ended", {"name": "trainer"})]
    later = [(9000.0, "began", began), (9001.0, "started", started), (9010.0, "beat", {})]
    write_events(tmp_path, *killed, *resumed, *later)
    steps = [(1, 4.0), (2, 8.0), (2, 25.0), (3, 30.0), (4, 9005.0)]
    lines = [{"step": step, "time": at, "time/step": 1.0} for step, at in steps]
    (tmp_path / "monitor/trainer.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = cost.account("a/b", cost.measure(tmp_path), Groups(), {})
    aborted, again, away, loads = 1, 1, 12, 3
    assert [(one["count"], one["seconds"]) for one in found["losses"]] == [(1, aborted + again + away + loads)]
    assert "ended without a word" in found["losses"][0]["cause"]
    assert found["ettr"] == pytest.approx(1 - 17 / (9 + 11 + 20 + 10))
    assert found["kills"] == 1


def test_an_account_without_reasons_is_one_of_an_older_version(tmp_path: Path) -> None:
    write_events(tmp_path, *of("trainer"))
    assert losses_text(fates.losses(lives.read(tmp_path), [])) == ["9 s lost, 1 time(s): the trainer died"]


def test_what_ran_when_an_explorer_was_killed_is_aborted(tmp_path: Path) -> None:
    write_events(tmp_path, *of("explorer"))
    folder = device_log.folder_of(tmp_path)
    for pid, began, at, running in ((11, 2.0, 4.5, 0.5), (12, 7.0, 10.0, 0.0)):
        account = {"pid": pid, "began": began, "time": at, "seconds": {"stored": 1.0, "failed": 0.25}}
        (folder / f"one-{pid}.json").write_text(json.dumps({**account, "running": running}))
    (watch,) = lives.read(tmp_path)
    found = fates.of_watch(watch, tmp_path, [])
    assert dict(found) == {
        "stored": 2.0, "failed": 0.5, "aborted": 1.0, "starting": 3.0, "idle": 0.75 + 1.75, "restarting": 1.0
    }  # fmt: skip
    assert sum(found.values()) == watch.seconds


def test_devices_of_a_supervisor_that_was_killed_are_counted_up_to_its_last_beat(tmp_path: Path) -> None:
    first = [*of("trainer")[:2], (4.0, "beat", {})]
    later = [(at + 100, event, more) for at, event, more in of("trainer")]
    write_events(tmp_path, *first, *later)
    path = device_log.folder_of(tmp_path) / "main.jsonl"
    path.write_text(path.read_text() + '{"time": 111.0, "eve')
    watches = lives.read(tmp_path)
    assert [watch.seconds for watch in watches] == [4.0, 10.0]
    assert watches[0].lives[0].ended == 4.0


def test_stored_seconds_are_divided_by_tokens() -> None:
    groups = Groups()
    for entry in ledger(dropped={2: [20]}).entries:
        groups.add(wire.batch(entry))
    groups.tokens[20] = sum(tokens for ordinal, tokens in groups.tokens.items() if ordinal != 20)
    shares = groups.shares(stored=len(groups.fates), duplicates=0)
    assert shares == {"trained": pytest.approx(0.5), "dropped (stale)": pytest.approx(0.5)}
    found = fates.divided(fates.Fates(float, {"stored": 8.0, "idle": 1.0}), shares)
    assert found == {"idle": 1.0, "trained": pytest.approx(4.0), "dropped (stale)": pytest.approx(4.0)}
    assert sum(one["seconds"] for one in groups.seconds(8.0, shares)) == pytest.approx(8.0, abs=1e-4)
    more = groups.shares(stored=len(groups.fates) + 1, duplicates=1)
    assert more["waiting"] == more["duplicate"] > 0
    assert sum(more.values()) == pytest.approx(1.0)


def test_a_late_group_of_a_cut_task_is_none_of_the_stored_ones() -> None:
    groups = Groups()
    for entry in ledger(cut={1: [20]}, late={2: [20]}).entries:
        groups.add(wire.batch(entry))
    groups.tokens[20] = 8
    shares = groups.shares(stored=len(groups.fates) - 1 + 2, duplicates=0)
    assert shares["dropped (cut)"] == shares["waiting"] / 2 > 0
    assert Groups().shares(stored=1, duplicates=0) == {"waiting": 1.0}


def test_a_budget_counts_all_stages_of_the_job(tmp_path: Path) -> None:
    for stage in ("sft", "rft"):
        write_events(tmp_path / stage, *of("trainer", devices=180))
    write_events(tmp_path / "rft/replay/fresh/p/n-fresh/rft", *of("trainer", devices=180))  # another run
    assert not budget.Budget(None, tmp_path).is_spent()
    assert not budget.Budget(1.1, tmp_path).is_spent()
    assert budget.Budget(1.0, tmp_path).is_spent()
    assert "1 hours of devices are spent, and 0.5 is the limit; raise it" in budget.Budget(0.5, tmp_path).text()


def test_the_command_asks_for_a_run_whose_folder_is_here() -> None:
    options = {option for one in get_command(app).params for option in one.opts}
    assert {"--config", "--job", "--stage"} <= options
    assert not {"--nats", "--run"} & options


def test_the_table_has_a_column_for_each_service() -> None:
    process = {"name": "trainer", "service": "trainer", "devices": 1.0, "fates": {"trained": 3.0}}
    found = {"gpu_seconds": 4.0, "gpu_hours": 4 / 3600, "kills": 1, "fates": {"trained": 3.0}, "processes": [process]}
    found |= {"losses": [{"cause": "node b is lost", "count": 3, "seconds": 71.6}], "ettr": 0.8765}
    lines = render("a/b", found).splitlines()
    assert lines[0] == "a/b: 0.001 hours of devices (1 of trainer), 1 processes died"
    assert lines[1].split() == ["seconds", "of", "devices", "trainer", "all", "share"]
    assert lines[2].split() == ["trained", "3.0", "3.0", "75.0%"]
    assert lines[3] == "72 s lost, 3 time(s): node b is lost"
    assert lines[4] == "ETTR 87.6%: the part of the trainer's time that these did not cost"
    assert not any("ETTR" in line for line in render("a/b", found | {"losses": []}).splitlines())
