"""Every query of deploy/grafana and deploy/prometheus names metrics and labels that the services declare."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from support.checks.queries import DASHBOARDS, DEPLOY, Asked, alerts, asked_by, queries
from trinity.cli.main import app

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import generate_metrics  # noqa: E402

# Metrics of Prometheus and its client, with their labels.
FOREIGN = {"up": set(), "ALERTS": {"alertname", "alertstate"}, "process_resident_memory_bytes": set()}
OF_TARGETS = {"job", "instance", "service", "run"}


@pytest.fixture(scope="module")
def declared() -> dict[str, set[str]]:
    """Returns the labels of each sample, by name."""
    found: dict[str, set[str]] = {name: set(labels) for name, labels in FOREIGN.items()}
    for family in generate_metrics.families():
        found |= {name: {*family.labels, "le"} if name.endswith("_bucket") else set(family.labels)
                  for name in family.samples}  # fmt: skip
    return found


def unknown(asked: set[Asked], declared: dict[str, set[str]]) -> list[str]:
    problems = [f"no metric {one.metric}" for one in asked if one.metric not in declared]
    return problems + [
        f"{one.metric} has no label {label}"
        for one in asked
        for label in one.labels - declared.get(one.metric, one.labels) - OF_TARGETS
    ]


def test_every_query_names_metrics_and_labels_that_services_have(declared: dict[str, set[str]]) -> None:
    assert len(queries()) > 60
    problems = {place: found for place, query in queries().items() if (found := unknown(asked_by(query), declared))}
    assert not problems


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(trinity_trainer_nothing_total[5m])", "no metric trinity_trainer_nothing_total"),
        ("trinity_sync_members - on (colour) up", "trinity_sync_members has no label colour"),
        ('trinity_sync_members{colour="red"}', "trinity_sync_members has no label colour"),
        ("1 + sum by (colour) (-(trinity_sync_members))", "trinity_sync_members has no label colour"),
        ("max_over_time(trinity_sync_gone[1h:5m])", "no metric trinity_sync_gone"),
    ],
)
def test_what_no_service_has_is_found(query: str, problem: str, declared: dict[str, set[str]]) -> None:
    assert problem in unknown(asked_by(query), declared)


def test_what_is_no_query_is_found() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        asked_by("sum by (trinity_x")


def test_every_alert_has_a_section_of_the_runbook() -> None:
    page = (ROOT / "docs/runbook.md").read_text()
    sections = dict(re.findall(r"^## (Trinity\w+)\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == [rule["alert"] for rule in alerts()]
    for text in sections.values():
        assert re.search(r"\*\*Meaning\.\*\* .+\*\*Look at\*\* .+\*\*Do\.\*\* ", text, re.DOTALL)
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_what_the_runbook_names_is_in_the_dashboard_in_logs_and_on_the_command_line() -> None:
    page = (ROOT / "docs/runbook.md").read_text()
    (board,) = (one for one in (json.loads(file.read_text()) for file in DASHBOARDS) if one["uid"] == "trinity-run")
    named = {" ".join(name.split()) for name in re.findall(r'"([^"]+)"', page)}
    assert named - {panel["title"] for panel in board["panels"]} == {board["title"]}
    sources = [
        path.read_text()
        for part in ("lib", "services", "cli", "satellites")
        for path in (ROOT / part).glob("**/src/**/*.py")
    ]
    events = re.findall(r"`((?:buffer|explorer|nats|sync)\.[a-z_.]*[a-z_])\.*`", page)
    assert len(events) > 4 and not [event for event in events if not any(f'"{event}' in text for text in sources)]
    for line in set(re.findall(r"`trinity ([a-z ]+)`", page)):
        done = CliRunner().invoke(app, [*line.split(), "--help"])
        assert done.exit_code == 0, done.output


def test_dashboards_are_told_apart_and_have_something_to_show() -> None:
    boards = [json.loads(file.read_text()) for file in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 2
    for board in boards:
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        assert all(panel["targets"] for panel in panels)
        cells = {(x, y) for p in panels for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
                 for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])}  # fmt: skip
        assert len(cells) == sum(p["gridPos"]["w"] * p["gridPos"]["h"] for p in panels), "panels overlap"


def test_prometheus_scrapes_what_compose_starts() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    scraped = {target for static in job["static_configs"] for target in static["targets"]}
    scraped |= {f"{name}:{dns['port']}" for dns in job["dns_sd_configs"] for name in dns["names"]}
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    listens = {
        f"{alias}:{address.rpartition(':')[2]}"
        for name, service in services.items()
        for alias in (service["networks"]["run"]["aliases"] if isinstance(service.get("networks"), dict) else [name])
        for key, address in service.get("environment", {}).items()
        if key.endswith("_METRICS_LISTEN")
    }
    assert scraped == listens
