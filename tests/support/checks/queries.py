"""The PromQL of deploy/grafana and deploy/prometheus, and what each query asks for."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
ALERTS = DEPLOY / "prometheus/alerts.yml"
_VARIABLE = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


@dataclass(frozen=True)
class Asked:
    """A metric that a query names, with the labels that it matches or groups by."""

    metric: str
    labels: frozenset[str]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Every query, by where it is."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in alerts()}
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                found[f"{file.name}: {panel['title']} {target['refId']}"] = target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                match = _VARIABLE.fullmatch(variable["query"]["query"])
                assert match, variable
                found[f"{file.name}: ${variable['name']}"] = f"group by ({match['label']}) ({match['selector']})"
    return found


def asked_by(query: str) -> set[Asked]:
    """Raises ValueError for invalid PromQL."""
    return set(_asked(promql.parse(query.replace("$run", "run")), frozenset()))


def _asked(node: Any, grouped: frozenset[str]) -> Iterator[Asked]:
    match node:
        case promql.VectorSelector():
            yield Asked(node.name, grouped | {one.name for one in node.matchers.matchers})
        case promql.MatrixSelector():
            yield from _asked(node.vector_selector, grouped)
        case promql.AggregateExpr():
            yield from _asked(node.expr, grouped | frozenset(node.modifier.labels if node.modifier else ()))
        case promql.BinaryExpr():
            matching = node.modifier.matching if node.modifier else None
            grouped |= frozenset(matching.labels if matching else ())
            yield from _asked(node.lhs, grouped)
            yield from _asked(node.rhs, grouped)
        case promql.Call():
            for argument in node.args:
                yield from _asked(argument, grouped)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from _asked(node.expr, grouped)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            raise AssertionError(f"what is {node!r}?")
