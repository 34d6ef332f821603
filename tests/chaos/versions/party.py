"""Explorers and a sync service: with a Maker (maker.py) all of a run but the learning.

Tests call the explorers' Generate, continuously if wanted. Only their engines are not real: they compute with
transformers, like canaries (torch_engine.py).
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import AutoModelForCausalLM

from chaos.versions.maker import Named
from chaos.versions.view import RunView, busy, generate
from support.programs.forked_run import ForkedService
from support.programs.run import write_config
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.runtime import names

RUN = names.run_id("quickstart", "party")


class TransformersPolicy:
    """A model by transformers."""

    def __init__(self, model: Path) -> None:
        self.path = str(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.base: Named = [(name, parameter.detach().clone()) for name, parameter in self._model.named_parameters()]

    @torch.no_grad()
    def logprobs(self, weights: Named, token_ids: Sequence[int]) -> list[float]:
        self._model.load_state_dict(dict(weights), strict=False)
        logits = self._model(torch.tensor([list(token_ids)])).logits[0, :-1].float()
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return [float(value) for value in picked]


class Party(RunView):
    """start -> add explorers -> maker -> ... -> end. One NATS, one sync service."""

    def __init__(self, repository: Path, model: Path, data: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self._data = folder, model, data
        changes = {
            "name": "party",
            "model": {"model_path": str(model), "max_prompt_tokens": 64, "max_response_tokens": 1000},
            "buffer": {"explorer_input": {"taskset": {"path": str(data)}, "eval_tasksets": []}},
            "synchronizer": {"collective_timeout": 6},
            "explorer": {"rollout_model": {"cpu_kvcache_gib": 1.0, "max_num_seqs": 8}},
            "checkpoint_root_dir": str(folder / "jobs"),
            "stages": [],
        }
        self._config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "party.yaml", changes)
        self.nats = NatsServer(folder / "nats")
        self.explorers: dict[str, ServiceProcess] = {}
        self.sync: ServiceProcess

    def start(self, **sync_settings: str) -> "Party":
        self.nats.start()
        self.sync = ServiceProcess("sync", self.folder, NATS_URL=self.nats.url, **sync_settings).start()
        super().__init__(self.sync.address, RUN)
        return self

    def add(self, name: str, transports: str, **settings: str) -> ServiceProcess:
        """Start an explorer; it serves once a version is LIVE."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        explorer = ForkedService(
            "explorer",
            place,
            CONFIG_FILE=str(self._config),
            NAME=name,
            NATS_URL=self.nats.url,
            SYNC_ADDRESS=self.sync.address,
            TRANSPORTS=transports,
            DEVICE="cpu",
            **settings,
        )
        explorer.start(wait_seconds=0)
        self.explorers[name] = explorer
        return explorer

    def until(self, holds: Callable[[], Any], seconds: float, what: str) -> Any:
        """The first true value of `holds`. Fails after the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                if value := holds():
                    return value
            for name, explorer in self.explorers.items():
                assert explorer._process is None or explorer._process.poll() is None, f"{name}: {explorer.tail()}"
            time.sleep(0.1)
        tails = {name: explorer.tail() for name, explorer in self.explorers.items()}
        raise AssertionError(f"not within {seconds:g} s: {what}; members {self.members()}; {tails}")

    def until_all_serve(self, version: int, names: Sequence[str], seconds: float = 60) -> None:
        def holds() -> bool:
            members = self.members()
            return all(name in members and members[name].version == version for name in names)

        self.until(holds, seconds, f"{names} serve version {version}")

    def generate(self, name: str, prompt: Sequence[int], max_tokens: int) -> Any:
        """One completion, without an end token."""
        return generate(self.explorers[name].address, prompt, max_tokens)

    def busy(self, name: str, max_tokens: int = 100) -> contextlib.AbstractContextManager[list[Any]]:
        """Requests completions in sequence until the context ends. Yields the list of completions so far."""
        return busy(self.explorers[name].address, [1, 2, 3], max_tokens)

    def end(self) -> None:
        for explorer in self.explorers.values():
            explorer.kill()
        self.sync.kill()
        self.nats.stop()
