"""Samples of a process that serves one run carry the run; gauges forget what they no longer describe."""

import urllib.request

import pytest
from prometheus_client import REGISTRY

from trinity.runtime import metrics

pytestmark = pytest.mark.core

GAUGE = metrics.Gauge("trinity_test_things", "Things of a test", ["run", "kind"])
COUNTER = metrics.Counter("trinity_test_steps_total", "Steps of a test")


def scrape(run: str) -> list[str]:
    port = metrics.serve("127.0.0.1", 0, run=run)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return answer.read().decode().splitlines()


def test_every_sample_names_the_run_once() -> None:
    metrics.show(GAUGE, {("own", "a"): 1})
    COUNTER.inc(3)
    lines = scrape("quickstart-x")
    assert 'trinity_test_steps_total{run="quickstart-x"} 3.0' in lines
    assert 'trinity_test_things{kind="a",run="own"} 1.0' in lines
    assert "trinity_test_steps_total 3.0" in scrape("")


def test_a_gauge_shows_these_values_and_no_others() -> None:
    metrics.show(GAUGE, {("r", "a"): 1, ("r", "b"): 2})
    metrics.show(GAUGE, {("r", "b"): 3})
    assert REGISTRY.get_sample_value("trinity_test_things", {"run": "r", "kind": "b"}) == 3
    assert REGISTRY.get_sample_value("trinity_test_things", {"run": "r", "kind": "a"}) is None


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text; version=1.0.0; q=0.5, text/plain", "application/openmetrics-text"),
        ("application/openmetrics-text; version=x", "text/plain"),
        ("text/plain; version = 1..0", "text/plain"),
        ("text/plain; q=1, application/openmetrics-text; version=1.0.0, text/plain; version=", "text/plain"),
    ],
)
def test_an_odd_version_in_the_accept_header_gets_the_plain_format(accept: str, kind: str) -> None:
    port = metrics.serve("127.0.0.1", 0)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers.get_content_type() == kind
