"""Write the rules of Prometheus from the table of alarms: `make docs`. A test compares them.

Writes deploy/prometheus/alerts.yml and its copy in the chart, because helm reads no file outside the chart.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from trinity.reading.alarms import RULES, Rule

ROOT = Path(__file__).parents[1]
TARGETS = [ROOT / "deploy/prometheus/alerts.yml", ROOT / "deploy/helm/trinity/files/alerts.yml"]
_HEAD = """\
# Written by docs/generate_alerts.py. Each alert has a section in docs/runbook.md.
groups:
  - name: trinity
    rules:
"""


def document() -> str:
    return _HEAD + "".join(line + "\n" for rule in RULES.values() for line in _lines(rule))


def _lines(rule: Rule) -> Iterator[str]:
    query = rule.query
    if query is None:
        return
    yield f"      - alert: {query.alert}"
    # `format` would read PromQL's braces.
    yield f"        expr: {query.query.replace('{threshold}', f'{rule.threshold:g}')}"
    if query.minutes:
        yield f"        for: {query.minutes}m"
    yield f"        labels: {{severity: {'critical' if query.critical else 'warning'}}}"
    yield "        annotations:"
    yield f"          summary: {json.dumps(query.summary)}"
    yield f"          runbook_url: docs/runbook.md#{query.alert.lower()}"


if __name__ == "__main__":
    for target in TARGETS:
        target.write_text(document())
