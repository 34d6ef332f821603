"""Files of compose without Docker: its services as containers of this machine (containers.py).

    with Project(file, {"TRINITY_CONFIG": ..., "TRINITY_DATA": ...}, folder) as project:
        project.up("nats", "buffer")
        project.up("explorer-2")

Read from the file: command, environment, volumes, published ports, healthcheck, restart, stop_grace_period,
profiles. An image is its Dockerfile's ENTRYPOINT and CMD, with the packages of this test's Python; nats is the
nats-server of the tests, Prometheus the machine's. All services are in one network. With `network_mode: host` a service
is on this machine's, or, in a project that joins the network of another, a machine of its own.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from support.servers.containers import (
    Container,
    Network,
    Spec,
    forward,
    image_environment,
    image_volumes,
    program,
)

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
# Images of other projects, and the programs that stand for them where this machine has them.
_PROGRAMS = {"nats": "nats-server", "prom/prometheus": "prometheus"}
_FIELD = re.compile(r"([\w./@]+)=('[^']*'|\S+)")
# moby: the pause before a restart doubles, and is short again after a process that lived so long.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _LIVED_SECONDS = 0.1, 60.0, 10.0


class Loader(yaml.SafeLoader):
    """With the tag by which compose removes what the file before has."""


Loader.add_constructor("!reset", lambda *_: None)


def over(below: Any, above: Any) -> Any:
    """As compose merges files; what `!reset` names is absent. Lists are not merged here."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    merged = below | {key: over(below.get(key), value) for key, value in above.items()}
    return {key: value for key, value in merged.items() if value is not None or below.get(key, "") is None}


def interpolate(text: str, given: Mapping[str, str]) -> str:
    """`${NAME}`, `${NAME:-default}` and `${NAME:?why}` as compose reads them. KeyError for a missing required one."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if given.get(name):
            return given[name]
        if kind == "?":
            raise KeyError(f"{name}: {rest}")
        return rest if kind == "-" else ""

    return _VARIABLE.sub(value, text)


def seconds(duration: str) -> float:
    """Seconds of "30s" or "10m"."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


class Service:
    """A container that is started again as its `restart` says."""

    def __init__(self, container: Container, about: Mapping[str, Any]) -> None:
        self.container = container
        self.restarts = 0
        self.code: int | None = None
        """Exit code of a service that is not started again."""
        policy, _, most = about.get("restart", "no").partition(":")
        assert policy in ("no", "on-failure"), policy
        self._most = 0 if policy == "no" else int(most) if most else sys.maxsize
        self._grace = seconds(about.get("stop_grace_period", "10s"))
        check = about.get("healthcheck")
        self._check = list(check["test"][1:]) if check else []
        self._stopping = False
        self._ended = threading.Event()

    def start(self) -> None:
        self._stopping, self.code = False, None
        self._ended.clear()
        self.container.start()
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        pause, began = _FIRST_PAUSE_SECONDS, time.monotonic()
        while True:
            code = self.container.wait()
            if self._stopping or code == 0 or self.restarts >= self._most:
                self.code = code
                self._ended.set()
                return
            if time.monotonic() - began > _LIVED_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            time.sleep(pause)
            pause, began = min(2 * pause, _LONGEST_PAUSE_SECONDS), time.monotonic()
            self.restarts += 1
            self.container.start()

    def wait(self, wait_seconds: float) -> int | None:
        """The exit code of a service that ended for good; None after the time."""
        self._ended.wait(wait_seconds)
        return self.code

    def stop(self) -> tuple[int, float]:
        """Stops a service like `docker compose stop`. Returns its exit code and the seconds."""
        self._stopping, begin = True, time.monotonic()
        code = self.code if self.code is not None else self.container.stop(self._grace)
        return code, time.monotonic() - begin

    def destroy(self) -> None:
        self._stopping = True
        self.container.destroy()

    def events(self) -> list[dict[str, str]]:
        """The lines that it logged."""
        lines = (dict(_FIELD.findall(line)) for line in self.container.output().splitlines())
        return [{key: value.strip("'") for key, value in line.items()} for line in lines if "event" in line]

    def health(self) -> tuple[int, str]:
        """Exit code and output of its healthcheck; 1 for a container that does not run."""
        if self.container.pid == 0:
            return 1, "it does not run"
        done = self.container.execute(self._check)
        return done.returncode, done.stdout + done.stderr


class Project:
    """A context manager; at its end nothing runs any more. `network`: that of another project, which both use.

    `above`: a further file, over the first.
    """

    def __init__(
        self,
        file: Path,
        given: Mapping[str, str],
        folder: Path,
        network: Network | None = None,
        above: Path | None = None,
    ) -> None:
        self._makes_network, self.network = network is None, network or Network()
        self.file, self._above, self._folder = file, above, folder
        self._given = dict(given)
        self.services: dict[str, Service] = {}
        self._listeners: list[socket.socket] = []
        self._outsiders: list[Container] = []

    def __enter__(self) -> "Project":
        if self._makes_network:
            self.network.__enter__()
        self._given.setdefault("TRINITY_HOST", self.network.address)
        self._given.setdefault("TRINITY_USER", f"{os.getuid()}:{os.getgid()}")
        read = yaml.safe_load(self.file.read_text())
        if self._above is not None:
            read = over(read, yaml.load(self._above.read_text(), Loader))
        self._about: dict[str, Any] = json.loads(json.dumps(read["services"]), object_hook=self._interpolated)
        self._volumes = read.get("volumes", {})
        for name, about in self._about.items():
            image = about["image"].partition(":")[0]
            if "build" in about or (image in _PROGRAMS and Path(program(_PROGRAMS[image])).is_absolute()):
                self._add(name, about)
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        for service in self.services.values():
            service.destroy()
        for container in self._outsiders:
            container.destroy()
        if self._makes_network:
            self.network.__exit__()

    def _interpolated(self, found: dict[str, Any]) -> dict[str, Any]:
        def of(value: Any) -> Any:
            if isinstance(value, list):
                return [of(one) for one in value]
            return interpolate(value, self._given) if isinstance(value, str) else value

        return {key: of(value) for key, value in found.items()}

    def _add(self, name: str, about: Mapping[str, Any]) -> None:
        command = self._command(about)
        environment = {
            **image_environment(),
            **about.get("environment", {}),
        }
        volumes = [*image_volumes(), *(self._volume(text) for text in about.get("volumes", []) if ":" in text)]
        if "build" not in about and not Path(command[0]).is_relative_to("/usr"):
            volumes.append((Path(command[0]).parent, str(Path(command[0]).parent), True))
        user, _, group = about.get("user", "0:0").partition(":")
        on_host = self._makes_network and about.get("network_mode") == "host"
        ids = int(user), int(group)
        spec = Spec(f"{name}-1", command, environment, volumes, [name], ids, on_host=on_host)
        container = Container(self.network, spec, self._folder / name)
        self.services[name] = Service(container, about)
        for port in about.get("ports", []) if "profiles" not in about else []:
            host_address, outer, inner = port.rsplit(":", 2)
            self._publish((host_address, int(outer)), (container.address, int(inner)))

    def _command(self, about: Mapping[str, Any]) -> list[str]:
        if "build" in about:
            dockerfile = self.file.parent / about["build"]["context"] / about["build"]["dockerfile"]
            lines = dict(re.findall(r"^(ENTRYPOINT|CMD) (.*)$", dockerfile.read_text(), re.MULTILINE))
            entry, default = json.loads(lines["ENTRYPOINT"]), json.loads(lines["CMD"])
            return [program(entry[0]), *entry[1:], *about.get("command", default)]
        return [program(_PROGRAMS[about["image"].partition(":")[0]]), *about["command"]]

    def _volume(self, text: str) -> tuple[Path, str, bool]:
        source, path, *mode = text.split(":")
        if source in self._volumes:
            kept = self._folder / "volumes" / source
            kept.mkdir(parents=True, exist_ok=True)
            return kept, path, False
        return (self.file.parent / source).resolve(), path, mode == ["ro"]

    def _publish(self, outer: tuple[str, int], inner: tuple[str, int]) -> None:
        """Forwards connections to this machine's address to the container, like docker-proxy."""
        listener = socket.create_server(outer)
        self._listeners.append(listener)
        threading.Thread(target=forward, args=(listener, inner), daemon=True).start()

    def up(self, *names: str) -> None:
        for name in names or [name for name in self.services if "profiles" not in self._about[name]]:
            self.services[name].start()

    def outsider(
        self, name: str, identity: Path, *command: str, files: Mapping[Path, str] | None = None, **given: str
    ) -> Container:
        """Another machine of the network, with an identity, files by their place there, and environment variables.

        It runs a command of an image; without one it is for `execute`.
        """
        environment = dict(self.services["buffer"].container.spec.environment)
        environment = {key: value for key, value in environment.items() if not key.startswith("TRINITY_")}
        environment["TRINITY_IDENTITY"] = "/identity"
        shared = [(path, place, False) for path, place in (files or {}).items()]
        volumes = [*image_volumes(), (identity, "/identity", True), *shared]
        run = [program(command[0]), *command[1:]] if command else ["/bin/sleep", "100000"]
        spec = Spec(name, run, {**environment, **given}, volumes)
        container = Container(self.network, spec, self._folder / name)
        self._outsiders.append(container)
        container.start()
        return container
