"""The Prometheus of compose.yaml, which answers every query of deploy/grafana and deploy/prometheus."""

import json
import time
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from support.checks.queries import DEPLOY, queries
from support.servers.containers import Container

_EXPLORERS = ("explorer", "explorer-2")
_SCRAPES = 3  # a rate needs two samples
_SECONDS = 300.0


class Prometheus:
    """Its configuration is deploy/prometheus. Explorers are named: the DNS that has several addresses of a name is
    Docker's."""

    def __init__(self, container: Container, folder: Path) -> None:
        folder.mkdir()
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        (job,) = config["scrape_configs"]
        (names,) = job.pop("dns_sd_configs")
        job["static_configs"] += [{"targets": [f"{name}:{names['port']}" for name in _EXPLORERS]}]
        config["global"]["scrape_interval"] = "5s"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yml").write_text((DEPLOY / "prometheus/alerts.yml").read_text())
        volumes = [(folder, there, mode) if there == "/etc/prometheus" else (source, there, mode)
                   for source, there, mode in container.spec.volumes]  # fmt: skip
        container.spec = replace(container.spec, volumes=volumes)
        self._container = container

    def answers(self, run: str) -> dict[str, int]:
        """Number of series of each query, by its place. Raises AssertionError for a query that Prometheus refuses."""
        self._until_scraped()
        rules = self._ask("rules")["groups"]
        assert all(rule["health"] == "ok" for group in rules for rule in group["rules"]), rules
        return {name: len(self._ask("query", query=query.replace("$run", run))["result"])
                for name, query in queries().items()}  # fmt: skip

    def _until_scraped(self) -> None:
        """Until every service has been scraped, and rules evaluated."""
        deadline = time.monotonic() + _SECONDS
        wanted = f"min(count_over_time(up[1m]) and up == 1) >= {_SCRAPES}"
        while True:
            up = {one["metric"]["instance"] for one in self._ask("query", query="up == 1")["result"]}
            rules = [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]
            done = self._ask("query", query=wanted)["result"] and all(rule["health"] == "ok" for rule in rules)
            if done and len(up) >= 5:
                return
            assert time.monotonic() < deadline, (up, rules)
            time.sleep(1)

    def _ask(self, path: str, **parameters: str) -> Any:
        url = f"http://{self._container.address}:9090/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", (path, parameters, found)
        return found["data"]
