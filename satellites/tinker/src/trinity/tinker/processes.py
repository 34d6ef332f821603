"""The processes of `trinity tinker`: NATS, the gateway of clients, the executor of their commands, and an explorer."""

import asyncio
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from trinity.config.memory import vocabulary_of
from trinity.reading.children import Child, stop_all
from trinity.reading.ending import Ending, ended_by_signals
from trinity.reading.errors import RunError
from trinity.reading.job import Job
from trinity.reading.nats import NatsAccess
from trinity.reading.processes import open_nats, service_child
from trinity.runtime.names import run_id
from trinity.runtime.process import FileLock
from trinity.runtime.trust.keys import make_key_file
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import make_tokens
from trinity.tinker.config import TinkerConfig

_STOP_SECONDS, _POLL_SECONDS, _ASK_SECONDS = 6.0, 0.5, 5.0
_KEY_PREFIX = "tml-"  # the client takes no other keys


class _Place(Job):
    """The folder of a service for tinker clients, which is no run's."""

    def __init__(self, config: TinkerConfig) -> None:
        self.folder = config.folder
        self.token = run_id("tinker", config.name)


def serve(config: TinkerConfig) -> None:
    """Serves until SIGINT or SIGTERM. Raises RunError."""
    lock = FileLock(config.folder / ".lock")
    if not lock.acquire():
        raise RunError(f"{config.folder} is in use by process {lock.owner()}; give another name in the YAML")
    try:
        asyncio.run(_serve(config, _Place(config)))
    finally:
        lock.release()


async def _serve(config: TinkerConfig, place: Job) -> None:
    vocabulary = vocabulary_of(config.model_path)
    if not vocabulary:
        raise RunError(
            f"model_path: {config.model_path} has no config.json with vocab_size on this machine; fetch it", 2
        )
    keys = {tenant: make_key_file(place.folder / "keys" / tenant, _KEY_PREFIX) for tenant in config.tenants}
    for path in (place.folder / "keys").iterdir():
        if path.name not in keys:
            path.unlink()  # a tenant that the YAML no longer names
    make_tokens(place.folder / "identity")  # other users of this machine must not reach the explorer
    stop, children = Ending("the same command serves again"), list[Child]()
    keepers: list[asyncio.Task[str]] = []
    with ended_by_signals(stop):
        try:
            nats = await open_nats(place, children, stop)
            explorers = [sampler(config, place)] if config.sampled_adapters else []
            address = explorers[0].address if explorers else ""
            services = [executor(config, place, nats), *explorers, gateway(config, place, nats, vocabulary, address)]
            children += services
            for child in services:
                child.say = _say
                child.start()
            keepers += [asyncio.create_task(child.keep_running(asyncio.Event())) for child in children]
            host = f"[{config.address}]" if ":" in config.address else config.address
            url, told = f"http://{host}:{config.port}", False
            while not stop.is_set():
                for keeper in keepers:
                    if keeper.done():
                        raise RunError(keeper.result())
                if not told and await asyncio.to_thread(_answers, url, next(iter(keys.values()))):
                    told = True
                    _say(
                        f"serving {url} with {config.base_model or config.model_path}; keys in {place.folder / 'keys'}"
                    )
                    first = keys[config.tenants[0]]
                    _say(f'try it: TINKER_BASE_URL={url} TINKER_API_KEY="$(head -1 {first})" python ...')
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            for keeper in keepers:
                keeper.cancel()  # it would restart what ends now
            await stop_all(children, _STOP_SECONDS, stop.at_once)


def executor(config: TinkerConfig, place: Job, nats: NatsAccess) -> Child:
    """Returns the process that has the model."""
    settings = {
        **_common(config, place, nats, "tenants"),
        "MODEL_PATH": config.model_path,
        "FOLDER": str(place.folder / "tenants"),
        "DTYPE": config.dtype,
        "MICRO_TOKENS": str(config.micro_tokens),
        "SNAPSHOT_COMMANDS": str(config.snapshot_commands),
        **({} if config.share_passes is None else {"SHARE_PASSES": str(config.share_passes)}),
    }
    return _child("tenants", "executor", place, settings)


def sampler(config: TinkerConfig, place: Job) -> Child:
    """Returns the process that samples by adapters that the executor saved."""
    settings = {
        "IDENTITY_FOLDER": str(place.folder / "identity"),
        "RUN": place.token,
        "MODEL_PATH": config.model_path,
        "FOLDER": str(place.folder / "tenants"),
        "DTYPE": config.dtype,
        "LONGEST": str(config.max_length),
        "MOST_ADAPTERS": str(config.sampled_adapters),
        "MOST_RANK": str(config.max_rank),
        "DEVICES": config.sampler_devices,
        "GPU_MEMORY_GIB": str(config.sampler_gpu_gib),
    }
    return _child("sampler", "sampler", place, settings)


def gateway(config: TinkerConfig, place: Job, nats: NatsAccess, vocabulary: int, sampler: str) -> Child:
    """Returns the process that clients reach. sampler: address of the explorer, or an empty text."""
    local = Path(config.model_path).expanduser()
    settings = {
        **_common(config, place, nats, "tinker"),
        "SERVE_LISTEN": f"{config.address}:{config.port}",
        "KEYS_FOLDER": str(place.folder / "keys"),
        "BASE_MODEL": config.base_model or config.model_path,
        "TOKENIZER": str(local.absolute()) if local.is_dir() else config.model_path,
        "VOCABULARY": str(vocabulary),
        "LONGEST": str(config.max_length),
        "MOST_MODELS": str(config.max_models),
        "MOST_SAVES": str(config.max_saves),
        "SESSION_MINUTES": str(config.session_minutes),
        "SAMPLE_SECONDS": str(config.sample_minutes * 60),
        "MOST_RANK": str(config.max_rank),
        "WAITING_COMMANDS": str(config.waiting_commands),
        "WAITING_MIB": str(config.waiting_mib),
        "SAMPLER_ADDRESS": sampler,
    }
    return _child("tinker", "gateway", place, settings)


def _child(name: str, folder: str, place: Job, settings: dict[str, str]) -> Child:
    child = service_child(name, place.folder / "log", settings)
    child.command = [sys.executable, "-m", f"trinity.tinker.{folder}.main", "serve"]
    return child


def _common(config: TinkerConfig, place: Job, nats: NatsAccess, name: str) -> dict[str, str]:
    return {
        **nats.settings(Role.TINKER, place.token, name),
        "IDENTITY_FOLDER": str(place.folder / "identity"),
        "RUN": place.token,
        "LOG_RUN": "none",  # a run's buffer makes the stream of log lines, and there is none here
        "LOG_GIB": str(config.log_gib),
        "RESULT_HOURS": str(config.result_hours),
    }


def _answers(url: str, key: Path) -> bool:
    """Returns True if the gateway answers there: it knows the key."""
    near = url.replace("//0.0.0.0", "//127.0.0.1").replace("[::]", "[::1]")
    try:
        request = Request(f"{near}/api/v1/healthz", headers={"X-API-Key": key.read_text().strip()})
        with urlopen(request, timeout=_ASK_SECONDS) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _say(text: str) -> None:
    print(text, flush=True)
