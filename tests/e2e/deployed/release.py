"""A Helm release without Kubernetes: the pods of its manifests as containers of this machine (containers.py).

    with Release(folder) as release:
        release.apply(secrets)
        release.apply(render(config, explorer={"replicas": 1}))
        release.apply(render(config, explorer={"replicas": 2}))

Read from the manifests: commands, environment, users, mounted Secrets, ConfigMaps, claims and emptyDirs, names of
Services, probes, restarts, and the time that a pod gets to end. An image is the packages of this test's Python;
nats-server is the one of the tests. Not played: resources, policies, placement, and what kubelet does after probes
that fail.
"""

import base64
import os
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.servers.compose import Service
from support.servers.containers import Container, Network, Spec, forward, image_environment, image_volumes, program

Manifest = Mapping[str, Any]
_REPLICATED = ("Deployment", "StatefulSet")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass
class Pod:
    """`service` runs its first container; further ones run in the same namespaces, as with shareProcessNamespace."""

    name: str
    component: str
    spec: Manifest
    service: Service
    _others: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def container(self) -> Container:
        return self.service.container

    def start(self) -> None:
        self.service.start()
        for other in self.spec["containers"][1:]:
            assert self.spec["shareProcessNamespace"], f"{self.name}: only containers that share their processes"
            command = [*other["command"], *other.get("args", ())]
            with (self.container.folder / f"{other['name']}.out").open("ab") as out:
                line = self.container.beside([program(command[0]), *command[1:]])
                environment = dict(self.container.spec.environment)
                self._others.append(subprocess.Popen(line, env=environment, stdout=out, stderr=out))

    def probe(self) -> dict[str, str]:
        """Messages of the failing probes. Empty if all succeed."""
        container = self.spec["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        return {kind: said for kind in _PROBES if kind in container and (said := self._failure(container[kind], ports))}

    def _failure(self, probe: Manifest, ports: Mapping[str, int]) -> str:
        """Message of a failing probe. Empty if it succeeds."""
        if self.container.pid == 0:
            return "the container does not run"
        if "exec" in probe:
            command = probe["exec"]["command"]
            done = self.container.execute([program(command[0]), *command[1:]])
            return f"{done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""
        port = probe["httpGet"]["port"]
        where = f"http://{self.container.address}:{ports.get(port, port)}{probe['httpGet']['path']}"
        try:
            urllib.request.urlopen(where, timeout=60).close()
        except OSError as error:  # also HTTPError, for a status of 400 or more
            return str(error)
        return ""

    def stop(self) -> tuple[int, float]:
        """Deletes the pod. Returns its exit code and the seconds."""
        hook = self.spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ())
        if hook:
            done = self.container.execute([program(hook[0]), *hook[1:]])
            assert done.returncode == 0, f"{self.name}: preStop ended with {done.returncode}: {done.stderr}"
        return self.service.stop()

    def destroy(self) -> None:
        self.service.destroy()
        for other in self._others:
            other.kill()
            other.wait()


class Release:
    """A context manager; at its end nothing runs any more. `pods` by name, those of Deployments with a number."""

    def __init__(self, folder: Path) -> None:
        self.network = Network()
        self.pods: dict[str, Pod] = {}
        self._folder = folder
        self._there: dict[tuple[str, str], Manifest] = {}  # by kind and name
        self._listeners: list[socket.socket] = []

    def __enter__(self) -> "Release":
        self.network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        for pod in self.pods.values():
            pod.destroy()
        self.network.__exit__()

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Starts missing pods, like `kubectl apply`. Raises AssertionError for a changed template."""
        self._there |= {(one["kind"], one["metadata"]["name"]): one for one in manifests}
        missing = []
        for workload in list(self._there.values()):
            for name in _names(workload):
                if name not in self.pods:
                    missing.append(self._make(name, workload))
                assert self.pods[name].spec == workload["spec"]["template"]["spec"], f"{name} would be replaced"
        for pod in missing:  # once the addresses of all are known
            pod.start()

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.component == component]

    def claim(self, name: str) -> Path:
        """The folder of a claim."""
        folder = self._folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def forward(self, pod: Pod, port: int) -> str:
        """The address on this machine of a pod's port, like `kubectl port-forward`."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        threading.Thread(target=forward, args=(listener, (pod.container.address, port)), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _make(self, name: str, workload: Manifest) -> Pod:
        template = workload["spec"]["template"]
        spec, labels = template["spec"], template["metadata"]["labels"]
        container = spec["containers"][0]
        security = spec["securityContext"]
        user = (security["runAsUser"], security["runAsGroup"])
        folder = self._folder / "pods" / name
        command = [*container["command"], *container.get("args", ())]
        environment = {one["name"]: _value(one, name) for one in container.get("env", ())}
        given = Spec(
            name,
            [program(command[0]), *command[1:]],
            {**image_environment(), **environment},
            [*image_volumes(), *self._mounts(name, workload, folder / "volumes")],
            list(self._host_names(name, workload, labels)),
            user,
            container["securityContext"]["readOnlyRootFilesystem"],
        )
        again = "no" if workload["kind"] == "Job" else "on-failure"
        about = {"restart": again, "stop_grace_period": f"{spec['terminationGracePeriodSeconds']}s"}
        component = labels["app.kubernetes.io/name"]
        self.pods[name] = Pod(name, component, spec, Service(Container(self.network, given, folder), about))
        return self.pods[name]

    def _host_names(self, pod: str, workload: Manifest, labels: Mapping[str, str]) -> Iterator[str]:
        """Names of the Services that select a pod, and its own in that of its StatefulSet."""
        for (kind, name), one in self._there.items():
            if kind == "Service" and one["spec"]["selector"].items() <= labels.items():
                yield name
        if "serviceName" in workload["spec"]:
            yield f"{pod}.{workload['spec']['serviceName']}"

    def _mounts(self, pod: str, workload: Manifest, folder: Path) -> Iterator[tuple[Path, str, bool]]:
        spec = workload["spec"]["template"]["spec"]
        group = spec["securityContext"]["fsGroup"]
        claimed = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {one["name"]: one for one in spec["volumes"]}
        for mount in spec["containers"][0]["volumeMounts"]:
            name = mount["name"]
            if name in claimed:
                source = self.claim(f"{name}-{pod}")
            elif volumes[name].get("emptyDir", {}).get("medium") == "Memory":
                continue  # /dev/shm, which every container has
            else:
                source = self._source(volumes[name], folder / name)
            _give(source, group)
            yield source, mount["mountPath"], mount.get("readOnly", False)

    def _source(self, volume: Manifest, folder: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.claim(volume["persistentVolumeClaim"]["claimName"])
        folder.mkdir(parents=True)
        for name, content, mode in self._files(volume):
            (folder / name).write_bytes(content)
            (folder / name).chmod(mode)
        return folder

    def _files(self, volume: Manifest) -> Iterator[tuple[str, bytes, int]]:
        """Name, content and mode of the files in a volume of Secrets or of a ConfigMap."""
        if "configMap" in volume:
            data = self._there["ConfigMap", volume["configMap"]["name"]]["data"]
            yield from ((name, text.encode(), 0o644) for name, text in data.items())
        for source in volume.get("projected", {}).get("sources", ()):
            data = self._there["Secret", source["secret"]["name"]]["data"]
            mode = volume["projected"]["defaultMode"]
            yield from ((name, base64.b64decode(text), mode) for name, text in data.items())


def _names(workload: Manifest) -> list[str]:
    """Names of a workload's pods. Empty for other manifests."""
    name = workload["metadata"]["name"]
    if workload["kind"] == "Job":
        return [name]
    count = workload["spec"].get("replicas", 1) if workload["kind"] in _REPLICATED else 0
    first = 0 if workload["kind"] == "StatefulSet" else 1
    return [f"{name}-{number}" for number in range(first, first + count)]


def _value(variable: Manifest, pod: str) -> str:
    if "valueFrom" not in variable:
        return str(variable["value"])
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}, variable
    return pod


def _give(folder: Path, group: int) -> None:
    """To a pod's fsGroup, as kubelet does: the group may write, unless a file's mode was given."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, -1, group)
        if path.is_dir():
            path.chmod(0o2770)
        else:
            path.chmod(path.stat().st_mode | 0o040)
