"""deploy/helm/trinity, rendered by helm: the binary of the package helm-binary."""

import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "deploy/helm/trinity"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
HELM = Path(sysconfig.get_path("scripts")) / "helm"

Manifest = Mapping[str, Any]


class Refused(AssertionError):
    """helm's message."""


def render(config: Path, *, example: str = "", namespace: str = "run1", **values: Any) -> list[dict[str, Any]]:
    """The manifests for a run's YAML. `values`: by section, over those of an example. Refused if helm refuses them."""
    given = ["--values", str(EXAMPLES[example])] if example else []
    text = _helm(["template", "run1", str(CHART), "--namespace", namespace], config, given, values)
    return [one for one in yaml.safe_load_all(text) if one is not None]


def lint(config: Path, **values: Any) -> str:
    """Output of `helm lint`. Raises Refused if it finds errors."""
    return _helm(["lint", str(CHART)], config, [], values)


def _helm(command: Sequence[str], config: Path, given: Sequence[str], values: Mapping[str, Any]) -> str:
    full = [str(HELM), *command, "--set-file", f"config={config}", *given, "--values", "-"]
    done = subprocess.run(full, input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Any]:
    """Those of a kind, by name."""
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def pods(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The pods' specifications, by component."""
    kinds = ("Deployment", "StatefulSet", "Job")
    templates = [one["spec"]["template"] for one in manifests if one["kind"] in kinds]
    return {one["metadata"]["labels"]["app.kubernetes.io/name"]: one["spec"] for one in templates}
