"""The quickstart, shortened, on real vLLM, DeepSpeed and JetStream, with what happens to runs in real life.

One journey: SFT, interrupted by Ctrl-C and gone on with, GRPO, a second explorer that joins and is killed, the trainer
killed, the end, the same command again, the same command with more steps. The tests look at what was seen on the way.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.checks.port_scan import Kind, Port, ports_of, reached_from_another_network, scan
from support.checks.queries import asked_by, queries
from support.programs.run import Status, TrinityRun, kill_process, process_of, write_config
from support.servers.otlp import Collector
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from trinity.runtime.trust.roles import Role

pytestmark = [pytest.mark.core, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, SAVE_INTERVAL, GROUPS = 20, 4, 8
SFT_STEPS, SFT_SAVE_INTERVAL = 20, 4
# A failure's words in any log: levels of structlog, glog, vLLM and NATS, tracebacks, compilers, and the color red.
# gRPC ends the reason of a call with "last error:"; services that end together may lose each other for a moment.
FAILURE = re.compile(
    r"""Traceback|CancelledError|\x1b\[(?:1;)?31m|\b(?:ERROR|CRITICAL|FATAL)\b|\[(?:ERR|FTL)\]|\b[gc]cc?:|collect2"""
    r"""|level['"]?[=:] ?['"](?:error|critical)['"]|^E\d{4} |(?<!last )error:""",
    re.MULTILINE,
)
SERVICES = {"nats", "buffer", "environment", "sync", "explorer", "trainer"}


@dataclass
class Interruption:
    """Ctrl-C in the middle of a stage."""

    code: int
    seconds: float
    left_alive: list[str]
    said: list[str]


@dataclass
class Ports:
    """Where the processes of the run listened, and how they answered who shows nothing."""

    known: dict[int, Kind]
    found: dict[Port, Kind]
    reached: set[int] | None  # from another network; None: it could not be tried


@dataclass
class Journey:
    """What was seen on the way."""

    interruption: Interruption
    sft_events: list[dict[str, Any]]
    status: Status
    metrics: dict[str, str]
    scraped: dict[str, set[str]]
    ports: Ports
    joined: Status
    extra_groups: int
    resumed: Status
    ledger_before: dict[int, list[int]]
    ledger_after: dict[int, list[int]]
    code: int
    summary: dict[str, Any]
    left_alive: list[str]
    again_code: int
    again_output: str
    longer_code: int
    longer_summary: dict[str, Any]
    longer_logs: dict[str, str]
    run: TrinityRun
    collector: Collector


@pytest.fixture(scope="module")
def journey(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("e2e")
    make_data = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(folder / "data")]
    subprocess.run([*make_data, "--test-size", "32"], check=True, timeout=60, capture_output=True)
    short = {
        "buffer": {"batch_size": GROUPS, "total_steps": STEPS},
        "explorer": {"eval_interval": STEPS},
        "trainer": {"save_interval": SAVE_INTERVAL},
        "stages": {0: {"buffer": {"total_steps": SFT_STEPS}, "trainer": {"save_interval": SFT_SAVE_INTERVAL}}},
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "arithmetic.yaml", short)
    environment = {
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(folder / "data"),
        "TRINITY_LOG_LEVEL": "DEBUG",  # for the lines of single groups
    }
    collector = Collector().start()
    run = TrinityRun(config, folder, **environment, **collector.environment())
    extra = TrinityRun(repository / "examples/quickstart/explorer_extra.yaml", folder)
    try:
        yield _travel(run, extra, collector)
    finally:
        extra.end()
        run.end()
        collector.stop()


def _travel(run: TrinityRun, extra: TrinityRun, collector: Collector) -> Journey:
    run.start()
    run.until(lambda s: (s["step"] or 0) > SFT_SAVE_INTERVAL, 120, "a step of the SFT stage after a checkpoint")
    interruption = _interrupt(run)

    run.start()
    run.until(lambda s: s["stage"] == "rft", 180, "the GRPO stage")
    extra.start()
    held = _hold(run)
    joined = run.until(lambda s: len(s["explorers"]) == 2, 400, "the second explorer")
    _release(run, held)
    status = run.until(lambda s: all(p["health"] == "SERVING" for p in _own(s)) and s["step"], 240, "everybody SERVING")
    groups = _wait_for_groups(run, joined)
    _pause(run, held)  # the run must not end while it is looked at
    metrics = {p["name"]: _scrape(p["metrics"]) for p in _own(status) if p["name"] != "nats"}
    scraped = _scrape_targets(run)
    ports = _scan_ports(run, extra)
    kill_process(joined, "extra")
    extra.kill()
    _release(run, held)

    job = run.job
    before = run.until(lambda s: (s["step"] or 0) > SAVE_INTERVAL, 200, "a step after a checkpoint")
    recorded = _trained(job)
    kill_process(before, "trainer")
    resumed = run.until(
        lambda s: process_of(s, "trainer")["restarts"] == 1 and s["trainer_state"] in ("waiting", "training"),
        120,
        "the trainer is back",
    )
    code = run.finish(400)
    summary = _summary(job)
    left_alive = [*run.left_alive(10), *extra.left_alive(10)]

    run.output.write_text("")
    run.start()
    again_code, again_output = run.finish(60), run.tail()
    sizes = {path: path.stat().st_size for path in job.rglob("log/*")}
    run.start(f"buffer.total_steps={STEPS + 2}", "explorer.eval_interval=1000", "explorer.eval_on_startup=false")
    longer_code = run.finish(300)
    return Journey(
        interruption=interruption,
        sft_events=_events(job / "sft/log/trainer.log"),
        status=status,
        metrics=metrics,
        scraped=scraped,
        ports=ports,
        joined=joined,
        extra_groups=groups,
        resumed=resumed,
        ledger_before=recorded,
        ledger_after=_trained(job),
        code=code,
        summary=summary,
        left_alive=left_alive,
        again_code=again_code,
        again_output=again_output,
        longer_code=longer_code,
        longer_summary=_summary(job),
        longer_logs={
            str(path.relative_to(job)): path.read_text(errors="replace")[sizes.get(path, 0) :]
            for path in job.rglob("log/*")
        },
        run=run,
        collector=collector,
    )


def _hold(run: TrinityRun) -> str:
    """Pause the trainer before its first step, so that the stage lasts until both explorers are there."""
    status = run.until(lambda s: process_of(s, "trainer")["health"].endswith("SERVING"), 120, "the trainer answers")
    address = str(process_of(status, "trainer")["address"])
    assert _pause(run, address) == 0
    return address


def _pause(run: TrinityRun, address: str) -> int:
    with run.channel(address) as channel:
        answer = trainer_pb2_grpc.TrainerServiceStub(channel).Pause(trainer_pb2.PauseRequest(), timeout=120)
    return answer.step


def _release(run: TrinityRun, address: str) -> None:
    with run.channel(address) as channel:
        trainer_pb2_grpc.TrainerServiceStub(channel).Resume(trainer_pb2.ResumeRequest(), timeout=10)


def _interrupt(run: TrinityRun) -> Interruption:
    run.output.write_text("")
    run.signal(signal.SIGINT)
    begin = time.monotonic()
    code = run.finish(30)
    seconds = time.monotonic() - begin
    said = [line for line in run.output.read_text().splitlines() if "SIGINT" in line]
    return Interruption(code, seconds, run.left_alive(1), said)


def _events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def _own(status: Status) -> list[dict[str, Any]]:
    return [p for p in status["processes"] if p["name"] in SERVICES]


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return answer.read().decode()


def _scrape_targets(run: TrinityRun) -> dict[str, set[str]]:
    """Names of the samples of each service, at the addresses that the job folder has for Prometheus.

    An explorer has a lag once it serves a version: they are looked at for up to 30 s.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for _ in range(30):
        for entry in json.loads((run.job / "prometheus.json").read_text()):
            for family in text_string_to_metric_families(_scrape(entry["targets"][0])):
                found[entry["labels"]["service"]] |= {sample.name for sample in family.samples}
        if "trinity_sync_member_lag_versions" in found["sync"]:
            break
        time.sleep(1)
    return found


def _scan_ports(run: TrinityRun, extra: TrinityRun) -> Ports:
    """Of both commands and all that they started."""
    processes = run.status()["processes"]
    known = {_port(one["metrics"]): Kind.HTTP for one in processes}
    known |= {_port(one["address"]): Kind.NATS if one["name"] == "nats" else Kind.GRPC for one in processes}
    commands = {"trinity run": run.pid, "trinity run of extra": extra.pid}
    roots = {**commands, **{one["name"]: one["pid"] for one in processes}}
    found = asyncio.run(scan(ports_of(roots), known))
    reached = reached_from_another_network(one.port for one in found)
    closed = {one for one, kind in found.items() if kind is Kind.GONE} - set(ports_of(roots))
    return Ports(known, {one: kind for one, kind in found.items() if one not in closed}, reached)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _wait_for_groups(run: TrinityRun, joined: Status) -> int:
    """Groups that the second explorer stored, once there is one."""

    def stored(status: Status) -> int:
        text = _scrape(process_of(status, "extra")["metrics"])
        lines = [line for line in text.splitlines() if line.startswith("trinity_explorer_groups_total{")]
        return int(sum(float(line.split()[-1]) for line in lines))

    return stored(run.until(stored, 120, "a group of the second explorer"))


def _summary(job: Path) -> dict[str, Any]:
    return json.loads((job / "summary.json").read_text())


def _trained(job: Path) -> dict[int, list[int]]:
    """Log sequences of the groups of each step, from the trainer's own record; the last time it trained the step."""
    noted: dict[int, list[int]] = {}
    for line in (job / "rft/monitor/batches.jsonl").read_text().splitlines():
        entry = json.loads(line)
        noted[entry["step"]] = entry["groups"]
    return noted


def test_ctrl_c_saves_and_ends_everything_within_twenty_seconds(journey: Journey) -> None:
    assert journey.interruption.code == 128 + signal.SIGINT
    assert journey.interruption.seconds < 20
    assert not journey.interruption.left_alive, "\n".join(journey.interruption.left_alive)
    said = journey.interruption.said[-1]
    assert said.startswith("trinity: ended by SIGINT; the same command resumes the run at step ")
    assert said.endswith(f" of {SFT_STEPS} of stage sft")


def test_the_same_command_goes_on_from_the_checkpoint(journey: Journey) -> None:
    resumed = [event["step"] for event in journey.sft_events if event["event"] == "trainer.resumed"]
    assert len(resumed) == 1
    assert f"at step {resumed[0] + 1} of {SFT_STEPS}" in journey.interruption.said[-1]
    assert [stage["steps"] for stage in journey.summary["stages"]] == [SFT_STEPS, STEPS]


def test_status_lists_every_service_as_a_process_of_its_own(journey: Journey) -> None:
    processes = _own(journey.status)
    assert {p["name"] for p in processes} == SERVICES
    assert len({p["pid"] for p in processes}) == len(SERVICES)
    assert len({p["address"] for p in processes}) == len(SERVICES)
    assert {p["health"] for p in processes} == {"SERVING"}
    for name in ("buffer", "sync", "explorer", "trainer"):
        assert isinstance(process_of(journey.status, name)["weight_version"], int), name


def test_every_service_has_metrics(journey: Journey) -> None:
    assert set(journey.metrics) == SERVICES - {"nats"}
    assert all("trinity_" in text for text in journey.metrics.values())
    assert "trinity_buffer_tasks_fed" in journey.metrics["buffer"]


def test_every_query_of_dashboards_and_alerts_has_samples(journey: Journey) -> None:
    assert set(journey.scraped) == SERVICES - {"nats"}
    of_gpus, of_prometheus = {"trinity_trainer_gpu_memory_bytes"}, {"up", "ALERTS"}
    of_trouble = {"trinity_explorer_environment_away", "trinity_explorer_prompts_cut_total"}  # none before it
    asked = {one.metric for query in queries().values() for one in asked_by(query)}
    assert asked - set().union(*journey.scraped.values()) == of_gpus | of_prometheus | of_trouble


def test_every_port_is_on_the_loopback(journey: Journey) -> None:
    assert not [port for port in journey.ports.found if not port.is_local]
    if journey.ports.reached is None:
        pytest.skip("no other network can be made here; where each port listens was looked at")
    assert not [port for port in journey.ports.found if port.port in journey.ports.reached]


def test_every_port_refuses_who_shows_nothing(journey: Journey) -> None:
    """All but the pages of metrics and of NATS' monitor (docs/security.md, "Other doors"). A port that is in no list
    fails here with its process: gloo has some in trainer and explorers, and the trainer has the store of the group."""
    ports, gloo = journey.ports, {"trainer", "explorer", "extra"}
    others = {port: kind for port, kind in ports.found.items() if kind is not ports.known.get(port.port)}
    silent = {port for port, kind in others.items() if kind is Kind.SILENT and port.owner in gloo}
    stores = {port for port, kind in others.items() if kind is Kind.STORE and port.owner == "trainer"}
    assert {port: kind for port, kind in others.items() if port not in silent | stores} == {}
    assert ports.known.keys() <= {port.port for port in ports.found}
    assert len(stores) <= 1  # one that takes its time looks silent
    assert {port.owner for port in silent} == gloo


def test_a_second_explorer_joins_and_works(journey: Journey) -> None:
    assert {e["name"] for e in journey.joined["explorers"]} == {"explorer", "extra"}
    assert journey.extra_groups > 0


def test_the_killed_trainer_resumes_from_its_checkpoint_with_the_same_batches(journey: Journey) -> None:
    assert journey.resumed["step"] >= SAVE_INTERVAL
    assert journey.ledger_before
    for step, sequences in journey.ledger_before.items():
        assert journey.ledger_after[step] == sequences, f"step {step}"


def test_the_run_ends_well_and_the_counts_add_up(journey: Journey) -> None:
    assert journey.code == 0, journey.run.tail()
    summary = journey.summary
    expected = "steps reward_first reward_last eval_before eval_after groups_fed groups_stored dead_letters outstanding"
    expected += " duplicates_dropped versions tokens_generated tokens_trained wall_seconds stages"
    assert set(expected.split()) <= set(summary)
    assert summary["steps"] == STEPS
    assert summary["groups_fed"] == summary["groups_stored"] + summary["dead_letters"] + summary["outstanding"]
    assert summary["groups_stored"] == STEPS * GROUPS
    assert summary["dead_letters"] == 0
    assert summary["versions"] == STEPS + 1
    assert summary["tokens_trained"] > 0
    assert summary["tokens_generated"] > 0
    assert 0 <= summary["eval_before"] <= 1
    assert 0 <= summary["eval_after"] <= 1
    assert [stage["stage"] for stage in summary["stages"]] == ["sft", "rft"]


def test_every_group_was_trained_once(journey: Journey) -> None:
    used = [sequence for step, groups in journey.ledger_after.items() if step <= STEPS for sequence in groups]
    assert len(used) == len(set(used)) == STEPS * GROUPS


def test_nothing_outlives_the_run(journey: Journey) -> None:
    assert not journey.left_alive, "\n".join(journey.left_alive)


def test_the_same_command_has_nothing_left_to_do(journey: Journey) -> None:
    assert journey.again_code == 0
    assert journey.again_output.startswith("nothing left to do")
    assert len(journey.again_output.splitlines()) == 1


def test_more_steps_go_on_where_it_stopped(journey: Journey) -> None:
    assert journey.longer_code == 0, journey.run.tail()
    assert journey.longer_summary["steps"] == STEPS + 2
    assert journey.longer_summary["groups_stored"] == (STEPS + 2) * GROUPS
    assert set(journey.ledger_after) == set(range(1, STEPS + 3))


def test_a_healthy_run_logs_nothing_that_looks_like_a_failure(journey: Journey) -> None:
    """Of the last command, in which nothing was killed. Its screen has no color, and its logs no red one."""
    shown = {"screen": journey.run.output.read_text(errors="replace"), **journey.longer_logs}
    assert {f"rft/log/{name}.log" for name in SERVICES - {"nats"}} <= {name for name, text in shown.items() if text}
    alarming = {name: found for name, text in shown.items() if (found := [*FAILURE.finditer(text)])}
    lines = {name: [shown[name][m.start() - 200 : m.end() + 200] for m in found] for name, found in alarming.items()}
    assert not lines, lines


def test_lines_of_every_service_name_the_trace_they_belong_to(journey: Journey) -> None:
    lines = {"buffer": "buffer.ledger.written", "sync": "sync.version.staged", "trainer": "trainer.step.done"}
    traces = {span.trace_id.hex() for span in journey.collector.spans}
    for service, line in {**lines, "explorer": "explorer.weights.loaded"}.items():
        found = [event.get("trace_id") for event in _events(journey.run.job / f"rft/log/{service}.log")
                 if event["event"] == line]  # fmt: skip
        assert found and None not in found, service
        assert traces & set(found), service


def test_one_trace_id_finds_the_lines_of_a_group_in_every_service_that_touches_it(journey: Journey) -> None:
    lines = {"buffer": {"buffer.task.fed", "buffer.entry.validated"}, "explorer": {"explorer.group.stored"},
             "environment": {"rpc.call.answered"}, "trainer": {"trainer.group.trained"}}  # fmt: skip
    found: dict[str, set[str]] = defaultdict(set)
    for service in lines:
        for event in _events(journey.run.job / f"rft/log/{service}.log"):
            found[str(event.get("trace_id"))].add(str(event["event"]))
    whole = set().union(*lines.values())
    assert len([trace for trace, events in found.items() if trace != "None" and events >= whole]) > GROUPS


def test_one_trace_leads_from_the_task_to_the_gradient_step(journey: Journey) -> None:
    whole = journey.collector.trained_traces()
    assert len(whole) > GROUPS, sorted({span.name for span in journey.collector.spans})


def test_tokens_are_in_no_file_but_their_own(journey: Journey) -> None:
    folder = journey.run.job / "identity"
    tokens = {path.name: path.read_bytes() for path in (folder / "tokens").iterdir()}
    assert len(tokens) == len(Role)
    kinds = {".log", ".out", ".json", ".jsonl", ".conf"}
    files = [path for path in journey.run.job.rglob("*") if path.suffix in kinds and folder not in path.parents]
    assert len(files) > 10
    assert not [(path, role) for path in files for role, token in tokens.items() if token in path.read_bytes()]
