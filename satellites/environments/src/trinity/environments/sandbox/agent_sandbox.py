"""Harbor's interface to Kubernetes' agent-sandbox: a Sandbox of agents.x-k8s.io, whose pod runs the task's image.

The cluster ends a Sandbox at its shutdownTime, whatever becomes of this process. Only Harbor's process loads this file.
"""

import asyncio
import contextlib
import io
import re
import shlex
import tarfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

try:
    from kubernetes import client, config
    from kubernetes.stream import stream
    from kubernetes.stream.ws_client import ERROR_CHANNEL
except ImportError:
    raise ImportError("agent-sandbox needs Kubernetes' client: pip install 'harbor[gke]'") from None

_KIND: dict[str, Any] = {"group": "agents.x-k8s.io", "version": "v1beta1", "plural": "sandboxes"}
_NO_NETWORK = {"trinity-network": "none"}  # a label of pods, by which a NetworkPolicy cuts them off
_LASTING = ("InvalidConfiguration", "PodFailed", "PodSucceeded", "SandboxExpired")
# Process 1 has no child: the end of a policy's processes would end it, too.
_WAIT = ["bash", "-c", "trap exit TERM; exec 3<> <(:); while :; do read -ru 3; done"]
_CALL_SECONDS = 20


class AgentSandbox(BaseEnvironment):
    """lease_seconds: after it the cluster ends the sandbox. ready_seconds: until its pod must be ready.

    runtime_class: of its pod, such as gvisor. Answers that repeat until someone grants a right are PermissionErrors.
    """

    def __init__(
        self,
        *args: Any,
        lease_seconds: float,
        ready_seconds: float,
        namespace: str = "default",
        runtime_class: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._ready_seconds = ready_seconds
        self._until = datetime.now(UTC) + timedelta(seconds=lease_seconds)
        self._namespace, self._runtime_class = namespace, runtime_class
        self._creation: asyncio.Future[Any] | None = None
        self._objects = client.CustomObjectsApi()
        self._named = {**_KIND, "namespace": namespace, "name": self.session_id}

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        try:
            config.load_config()
        except config.ConfigException as error:
            raise SystemExit(f"{error} Set KUBECONFIG to the file of a cluster, or run in one.") from None

    @staticmethod
    def type() -> str:
        return "agent-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None: ...  # runtimes.py has read the task

    def _body(self) -> dict[str, Any]:
        task = self.task_env_config
        most = {"memory": (task.memory_mb, "Mi"), "cpu": (task.cpus, ""), "ephemeral-storage": (task.storage_mb, "Mi")}
        limits = {name: f"{value}{unit}" for name, (value, unit) in most.items() if value}
        container = {"name": "task", "image": task.docker_image, "command": _WAIT, "resources": {"limits": limits}}
        pod = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
        container |= {"workingDir": task.workdir} if task.workdir else {}
        pod |= {"runtimeClassName": self._runtime_class} if self._runtime_class else {}
        labels = _NO_NETWORK if self._network_disabled else {}
        lease = {"shutdownTime": self._until.isoformat(timespec="seconds"), "shutdownPolicy": "Delete"}
        spec = {"podTemplate": {"metadata": {"labels": labels}, "spec": pod}, **lease}
        named = {"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": self.session_id}}
        return {**named, "spec": spec}

    async def start(self, force_build: bool) -> None:
        end = time.monotonic() + self._ready_seconds
        if self._network_disabled:  # one policy for all sandboxes of the namespace, which is there before their pods
            spec = {"podSelector": {"matchLabels": _NO_NETWORK}, "policyTypes": ["Ingress", "Egress"]}
            policy = {"metadata": {"name": "trinity-network-none"}, "spec": spec}
            create = client.NetworkingV1Api().create_namespaced_network_policy
            await _call(create, 409, namespace=self._namespace, body=policy)
        create = self._objects.create_namespaced_custom_object
        made = _call(create, **_KIND, namespace=self._namespace, body=self._body())
        self._creation = asyncio.ensure_future(made)
        await asyncio.shield(self._creation)
        while (ready := await self._ready()).get("status") != "True":
            if ready.get("reason") in _LASTING:
                raise RuntimeError(_text(ready))
            if time.monotonic() > end:
                raise TimeoutError(f"not ready in {self._ready_seconds:g} s: {await self._waits_for(ready)}")
            await asyncio.sleep(0.5)
        await self._upload_environment_dir_after_start()

    async def _ready(self) -> dict[str, Any]:
        found = await _call(self._objects.get_namespaced_custom_object, **self._named)
        conditions = found.get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == "Ready"), {})

    async def _waits_for(self, ready: dict[str, Any]) -> str:
        """Returns the reasons of the sandbox and of its pod's containers, such as ErrImagePull."""
        read = client.CoreV1Api().read_namespaced_pod
        pod = await _call(read, 403, 404, name=self.session_id, namespace=self._namespace)
        states = [one.state.to_dict() for one in (pod and pod.status.container_statuses) or []]
        return "; ".join(map(_text, [ready, *(state["waiting"] for state in states if state["waiting"])]))

    async def stop(self, delete: bool) -> None:
        if self._creation is not None:
            await asyncio.wait({self._creation})  # else it may be done after its end
        await _call(self._objects.delete_namespaced_custom_object, 404, **self._named)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command as the user of the image; `user` has no effect."""
        place = f"cd {shlex.quote(cwd)} && " if cwd else ""
        given = "".join(f"{name}={shlex.quote(value)} " for name, value in (env or {}).items())
        return await asyncio.to_thread(self._exec, place + given + command, timeout_sec)

    def _exec(self, command: str, seconds: float | None, stdin: bytes = b"") -> ExecResult:
        call = client.CoreV1Api(client.ApiClient()).connect_get_namespaced_pod_exec  # `stream` changes its client
        streams = {"stdin": bool(stdin), "stdout": True, "stderr": True, "tty": False, "_preload_content": False}
        line = ["bash", "-c", command]
        with _rights():
            channel = stream(call, self.session_id, self._namespace, command=line, **streams)
        with contextlib.closing(channel):
            if stdin:
                channel.write_stdin(stdin)
            channel.run_forever(timeout=seconds)
            if channel.is_open():
                raise TimeoutError(f"a command did not end within {seconds} s")
            out, err = channel.read_stdout(), channel.read_stderr()
            said = channel.peek_channel(ERROR_CHANNEL)
            try:
                return ExecResult(stdout=out, stderr=err, return_code=channel.returncode)
            except Exception:
                raise RuntimeError(f"the connection of a command broke: {said or 'without a reason'}") from None

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._send(Path(source_path).read_bytes(), f"cat > {shlex.quote(target_path)}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in Path(source_dir).iterdir():
                archive.add(path, path.name)
        await self._send(packed.getvalue(), f"tar -x --no-same-owner -C {shlex.quote(target_dir)}")

    async def _send(self, data: bytes, command: str) -> None:
        """Gives data to a command. Its input has no end by Kubernetes' protocol, so the bytes are counted."""
        done = await asyncio.to_thread(self._exec, f"head -c {len(data)} | {command}", 60, data)
        if done.return_code:
            raise RuntimeError(f"a file cannot be written: {done.stdout}{done.stderr}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        raise NotImplementedError("Trinity reads files by commands")

    download_dir = download_file


async def _call(call: Callable[..., Any], *accepted: int, **asked: Any) -> Any:
    """accepted: the status of errors that are none."""
    with _rights():
        try:
            return await asyncio.to_thread(call, **asked, _request_timeout=_CALL_SECONDS)
        except client.ApiException as error:
            if error.status not in accepted:
                raise


@contextlib.contextmanager
def _rights() -> Iterator[None]:
    """Raises PermissionError for 401 and 403, which are a part of the reason where a WebSocket is refused."""
    try:
        yield
    except client.ApiException as error:
        if re.match("(0 Handshake status )?(401|403)", f"{error.status} {error.reason}"):
            raise PermissionError(f"Kubernetes refuses: {error.body or error.reason}") from None
        raise


def _text(condition: dict[str, Any]) -> str:
    return f"{condition.get('reason')}: {condition.get('message')}"
