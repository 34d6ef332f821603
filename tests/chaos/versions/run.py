"""One run with versions and members that are killed, stopped and restarted, and the judge of what came out.

open -> publish, strike, ... -> finish: violations as text.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from chaos.versions.audit import Given, Records, judge
from chaos.versions.maker import Maker
from chaos.versions.view import RunView, busy, generate
from chaos.versions.world import BUCKET, ROOT, World
from support.programs.member_process import MemberProcess
from support.programs.run import write_config
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime import names

FOLDER, S3, GROUP, OTHER = "by-folder", "by-s3", "by-group", "by-group-too"
TRANSPORTS = {FOLDER: "folder", S3: "s3", GROUP: "collective,folder", OTHER: "collective,s3"}
PROMPT, RESPONSE = [1, 2, 3], 30
_DRAIN_SECONDS = 2.0


class Violated(AssertionError):
    """The invariant does not hold."""


def check(holds: Any, what: str) -> None:
    if not holds:
        raise Violated(what)


class WeightsRun(RunView):
    """All members answer requests all the time; `given` are the responses that came out."""

    def __init__(self, world: World, name: str, **changes: Any) -> None:
        """`changes` of the YAML, by section."""
        super().__init__(world.sync.address, names.run_id("chaos", name))
        self.world = world
        self.folder = world.folder / name
        self.folder.mkdir()
        data = self.folder / "data"
        data.mkdir()
        for split in ("train", "test"):
            rows = "".join(f'{{"question": "{i}+1", "answer": "#### {i + 1}"}}\n' for i in range(50))
            (data / f"{split}.jsonl").write_text(rows)
        self.config = write_config(
            ROOT / "examples/quickstart/arithmetic.yaml", self.folder / "run.yaml", self._yaml(name, changes)
        )
        self.explorers: dict[str, MemberProcess] = {}
        self.given: list[Given] = []
        self.settings: dict[str, str] = {}  # of every explorer
        self.maker: Maker
        self._busy = contextlib.ExitStack()
        self._asked: list[list[Any]] = []

    def _yaml(self, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        taskset = {"path": str(self.folder / "data")}
        given = {
            "project": "chaos",
            "name": name,
            "model": {"model_path": self.world.policy.path, "max_prompt_tokens": 64, "max_response_tokens": 1000},
            "buffer": {"explorer_input": {"taskset": taskset, "eval_tasksets": []}},
            "synchronizer": {"collective_timeout": self.world.deadline},
            "checkpoint_root_dir": str(self.folder / "jobs"),
            "stages": [],
        }
        for section, values in changes.items():
            given[section] = {**given.get(section, {}), **values}
        return given

    def open(self, *members: str) -> "WeightsRun":
        """Version 0 is LIVE, and all of these serve it. They join at once."""
        for name in members:
            self.add(name)
        self.maker = Maker(
            self.world.sync.address,
            self.run,
            self.world.policy,
            self.folder,
            ("folder", f"s3://{BUCKET}/{self.folder.name}"),
            collective=True,
            deadline_seconds=self.world.deadline,
        )
        self.until_serve(0)
        return self

    def add(self, name: str) -> MemberProcess:
        member = MemberProcess(
            name,
            self.folder / name,
            self.world.s3.environment,
            self.world.engine,
            config_file=self.config,
            nats_url=self.world.nats.url,
            sync_address=self.world.sync.address,
            **self.settings,
            transports=TRANSPORTS[name],
            drain_seconds=_DRAIN_SECONDS,
        ).start()
        self.explorers[name] = member
        self._asked.append(self._busy.enter_context(busy(member.address, PROMPT, RESPONSE)))
        return member

    def publish(self, limit: float = 0.0, **how: Any) -> int:
        """The next version. No member may delay the trainer beyond the deadline of each step of a collective."""
        begin = time.monotonic()
        version = self.maker.publish(**how)
        took, limit = time.monotonic() - begin, limit or 3 * self.world.deadline + 2
        check(took < limit, f"publishing version {version} took {took:.1f} s; {limit:g} s are allowed")
        return version

    def until_serve(self, version: int, members: Sequence[str] = (), seconds: float = 0.0) -> None:
        wanted = members or list(self.explorers)

        def holds() -> bool:
            found = self.members()
            return all(name in found and found[name].version == version for name in wanted)

        self.until(holds, seconds or self.world.serve_seconds, f"{', '.join(wanted)} serve version {version}")

    def until(self, holds: Callable[[], Any], seconds: float, what: str) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                if value := holds():
                    return value
            time.sleep(0.03)
        found = {name: (m.version, m.state, m.transport, m.failure) for name, m in self.members().items()}
        dead = {name: member.tail() for name, member in self.explorers.items() if not member.lives}
        raise Violated(f"not within {seconds:g} s: {what}; members {found}; dead {dead}")

    def came_by(self, name: str, transport: str) -> None:
        found = self.members()[name].transport
        check(found == transport, f"{name} got its version by {found}, not by {transport}")

    def loads_of(self, name: str) -> int:
        """Number of pauses of its engine for loads since its start."""
        return sum(mark["what"] == "loading" and mark["tensor"] == 0 for mark in self.explorers[name].noted)

    def generate(self, name: str, tokens: int) -> Given:
        """A response that is judged with all others."""
        given = Given.of(PROMPT, generate(self.explorers[name].address, PROMPT, tokens))
        self.given.append(given)
        return given

    def records(self) -> Records:
        """No further requests are sent."""
        self._busy.close()
        answers = [Given.of(PROMPT, completion) for done in self._asked for completion in done]
        weights = {version: self.maker.weights_of(version) for version in range(self.maker.version + 1)}
        return Records(
            given=[*self.given, *answers],
            versions=self.versions(),
            serving=self.members(),
            alive=set(self.explorers),
            logprobs=lambda version, tokens: self.maker.policy.logprobs(weights[version], tokens),
        )

    def finish(self) -> list[str]:
        """Violations once all is at rest, or the time is over."""
        with contextlib.suppress(Violated):
            self.until(self._rests, self.world.serve_seconds, "everybody serves what is LIVE")
        return judge(self.records())

    def _rests(self) -> bool:
        versions = self.versions()
        if versions and versions[max(versions)].state in (pb.VERSION_STATE_STAGED, pb.VERSION_STATE_VERIFIED):
            return False  # it will be LIVE soon
        live = [number for number, version in versions.items() if version.state == pb.VERSION_STATE_LIVE]
        members = self.members()
        return all(name in members and [members[name].version] == live for name in self.explorers)

    def end(self) -> None:
        """Everything of this run ends; its folder stays."""
        for member in self.explorers.values():
            with contextlib.suppress(AssertionError, ProcessLookupError):
                if member.lives:
                    member.go_on()
                member.kill()
        self._busy.close()
        if hasattr(self, "maker"):
            self.maker.close()
