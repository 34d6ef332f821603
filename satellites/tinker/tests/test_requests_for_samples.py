"""The gateway hands each request for samples to the explorer once, and keeps its answer for its tenant only."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from trinity.data.experience import SamplingParams
from trinity.runtime.errors import Conflict, Full, InvalidInput, NotFound, TimedOut, Unavailable
from trinity.tinker.commands.checks import Base
from trinity.tinker.commands.log import Command, Kind, canonical
from trinity.tinker.commands.samples import Sample
from trinity.tinker.gateway import sampling, shapes
from trinity.tinker.gateway.client import SamplerClient
from trinity.tinker.gateway.journal import Journal
from trinity.tinker.gateway.sampling import Failed, Gone, Sampling
from trinity.tinker.gateway.saves import Saved, Saves
from trinity.tinker.gateway.sessions import Signs
from trinity.tinker.sampler.servicer import SamplerServicer

pytestmark = pytest.mark.core

_PROMPT = {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}


class _Log:
    """The log of commands, in memory."""

    def __init__(self) -> None:
        self.stored: list[Command] = []

    async def append(self, command: Command, after: int) -> int:
        self.stored.append(command)
        return after + 1

    async def last_command(self) -> int:
        return len(self.stored)

    async def commands(self, after: int, through: int) -> AsyncIterator[Command]:
        for position, command in enumerate(self.stored[after:through], after + 1):
            yield replace(command, position=position)


class _Explorer:
    """Answers with the version once it may."""

    def __init__(self) -> None:
        self.asked: list[Sample] = []
        self.cancelled = 0
        self.may = asyncio.Event()
        self.is_there = True

    async def sample(self, sample: Sample) -> bytes:
        self.asked.append(sample)
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        match sample.sampling.seed:
            case 1:
                raise InvalidInput("sampling_params", "is refused by vLLM")
            case 2:
                raise Unavailable("the explorer does not answer")
        return b"answer of %d" % sample.version


class _Results:
    def __init__(self) -> None:
        self.there: set[str] = set()
        self.failed: set[str] = set()

    def has_worked(self, saved: Saved) -> bool:
        return saved.request_id in self.there and saved.request_id not in self.failed

    def has_failed(self, request_id: str) -> bool:
        return request_id in self.failed


class _Place:
    """A gateway's sampling, with a session of alice and one of bob."""

    def __init__(self) -> None:
        self.log, self.explorer, self.results = _Log(), _Explorer(), _Results()
        self.journal = Journal(self.log, Saves(2, self.results.has_failed))  # type: ignore[arg-type]
        base = Base("base", 10, 8)
        self.sampling = Sampling(self.journal, self.results, self.explorer, base, 4)  # type: ignore[arg-type]

    async def session(self, tenant: str) -> str:
        return await self.journal.open_session(tenant, b"{}")

    async def open(self, tenant: str, session: str, number: int = 0, **model: Any) -> str:
        body = {"session_id": session, "sampling_session_seq_id": number, **(model or {"base_model": "base"})}
        return await self.sampling.open(tenant, shapes.read(shapes.CreateSampler, body))

    async def create(self, model: str) -> None:
        body = canonical({"lora_config": {"rank": 4}})
        await self.journal.submit("alice", model, 0, Kind.CREATE_MODEL, body, lambda: None)

    async def save(self, model: str, seq_id: int, **values: Any) -> None:
        given = {"model_id": model, "seq_id": seq_id, **values}
        body = canonical(shapes.read(shapes.SaveSampler, given).model_dump())
        await self.journal.submit("alice", model, seq_id, Kind.SAVE_SAMPLER, body, lambda: None)

    def ask(self, tenant: str, sampler: str, seq_id: int, **others: Any) -> dict[str, Any]:
        seed = others.pop("seed", None)
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": _PROMPT, "sampling_params": {"seed": seed}}
        return self.sampling.submit(tenant, body | others)


async def test_a_request_is_made_once_and_its_answer_is_the_tenants() -> None:
    place = _Place()
    sampler = await place.open("alice", await place.session("alice"))
    promise = place.ask("alice", sampler, 0, num_samples=2)
    assert promise == place.ask("alice", sampler, 0, num_samples=2)
    assert promise["sample_sequence_ids"] == [f"{sampler}:0:0", f"{sampler}:0:1"]
    with pytest.raises(Conflict, match="holds another request"):
        place.ask("alice", sampler, 0)
    assert await place.sampling.retrieve("alice", promise["request_id"], 0.01) is None
    place.explorer.may.set()
    for _ in range(2):  # a client whose connection broke fetches again
        assert await place.sampling.retrieve("alice", promise["request_id"], 5) == b"answer of 0"
    (asked,) = place.explorer.asked
    assert (asked.sampling.max_tokens, asked.sampling.n) == (5, 2)
    for call in (
        lambda: place.sampling.retrieve("bob", promise["request_id"], 5),
        lambda: asyncio.to_thread(place.ask, "bob", sampler, 1),
        lambda: asyncio.to_thread(place.sampling.about, "bob", sampler),
        lambda: asyncio.to_thread(place.sampling.cancel, "bob", promise["request_id"]),
    ):
        with pytest.raises(NotFound, match="is not known"):
            await call()
    with pytest.raises(Gone):
        await place.sampling.retrieve("alice", f"{sampler}:9", 5)


async def test_failures_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    place = _Place()
    sampler = await place.open("alice", await place.session("alice"))
    place.explorer.may.set()
    for seed, by_user in ((1, True), (2, False)):
        request = place.ask("alice", sampler, seed, seed=seed)["request_id"]
        with pytest.raises(Failed) as failed:
            await place.sampling.retrieve("alice", request, 5)
        assert failed.value.by_user is by_user
    place.explorer.may.clear()
    cancelled = place.ask("alice", sampler, 5)["request_id"]
    place.sampling.cancel("alice", cancelled)
    with pytest.raises(Gone, match="was cancelled"):
        await place.sampling.retrieve("alice", cancelled, 5)
    place.explorer.may.set()
    old = place.ask("alice", sampler, 6)["request_id"]
    assert await place.sampling.retrieve("alice", old, 5)
    monkeypatch.setattr(sampling, "_KEPT_BYTES", 4)
    place.ask("alice", sampler, 7)
    with pytest.raises(Gone, match="is not kept"):
        await place.sampling.retrieve("alice", old, 5)


async def test_a_tenant_waits_for_a_bounded_number_of_sequences() -> None:
    place = _Place()
    alice, bob = [await place.open(name, await place.session(name)) for name in ("alice", "bob")]
    place.ask("alice", alice, 0, num_samples=3)
    with pytest.raises(Full, match="waits for 3 sequences; at most 4"):
        place.ask("alice", alice, 1, num_samples=2)
    large = place.ask("bob", bob, 0, num_samples=50)  # more than ever wait, but alone
    place.explorer.may.set()
    await place.sampling.retrieve("bob", large["request_id"], 5)
    assert place.ask("alice", alice, 1, num_samples=2)


async def test_sampling_sessions_follow_from_the_log() -> None:
    place = _Place()
    session = await place.session("alice")
    model = f"{session}:train:0"
    await place.create(model)
    await place.save(model, 1, path="named")
    await place.save(model, 2, sampling_session_seq_id=7)
    await place.save(model, 3, sampling_session_seq_id=8, kind="inflight")
    await place.save(model, 4, sampling_session_seq_id=9, kind="inflight")
    await place.save(model, 5, path="old", ttl_seconds=3600)
    named = await place.open("alice", session, 0, model_path=f"tinker://{model}/sampler_weights/named")
    assert named == await place.open("alice", session, 0, model_path=f"tinker://{model}/sampler_weights/named")
    with pytest.raises(Conflict, match="which is another one"):
        await place.open("alice", session, 0)
    restarted = _Place()
    restarted.log.stored = place.log.stored
    await restarted.journal.catch_up()
    restarted.explorer.may.set()
    versions = {}
    for sampler in (named, *(f"{session}:sample:{number}" for number in (7, 8, 9))):
        request = restarted.ask("alice", sampler, 0)["request_id"]
        versions[sampler[-1]] = await restarted.sampling.retrieve("alice", request, 5)
    assert versions == {"0": b"answer of 3", "7": b"answer of 4", "8": b"answer of 5", "9": b"answer of 6"}
    restarted.results.there.add(f"{model}:4")  # the newer inflight save is done
    request = restarted.ask("alice", f"{session}:sample:8", 1)["request_id"]
    assert await restarted.sampling.retrieve("alice", request, 5) == b"answer of 6"
    restarted.results.there.add(f"{model}:3")
    restarted.results.failed.add(f"{model}:4")  # then the save before it stays
    request = restarted.ask("alice", f"{session}:sample:8", 2)["request_id"]
    assert await restarted.sampling.retrieve("alice", request, 5) == b"answer of 5"
    new = {"path": "named", "sampling_session_seq_id": None}
    with pytest.raises(InvalidInput, match="choose another"):
        restarted.journal.check_new("alice", model, new)
    with pytest.raises(InvalidInput, match="another sampling session has"):
        restarted.journal.check_new("alice", model, {"path": None, "sampling_session_seq_id": 7})
    old = f"tinker://{model}/sampler_weights/old"
    assert restarted.journal.saved("alice", old).position == 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trinity.tinker.gateway.saves.now", lambda: 1e12)
        with pytest.raises(InvalidInput, match="ttl_seconds are over"):
            restarted.journal.saved("alice", old)
        restarted.journal.check_new("alice", model, {"path": "old", "sampling_session_seq_id": None})
    await restarted.journal.end_session("alice", session)
    with pytest.raises(NotFound, match="has ended"):
        restarted.ask("alice", named, 2)


async def test_a_failed_save_leaves_its_name_free() -> None:
    place = _Place()
    session = await place.session("alice")
    model, name = f"{session}:train:0", {"path": "named", "sampling_session_seq_id": None}
    await place.create(model)
    await place.save(model, 1, path="named")
    with pytest.raises(InvalidInput, match="choose another"):
        place.journal.check_new("alice", model, name)
    place.results.failed.add(f"{model}:1")
    place.journal.check_new("alice", model, name)
    path = f"tinker://{model}/sampler_weights/named"
    with pytest.raises(InvalidInput, match="whose save failed"):
        await place.open("alice", session, 0, model_path=path)
    await place.save(model, 2, path="named")
    assert place.journal.saved("alice", path).position == 4
    with pytest.raises(InvalidInput, match="choose another"):
        place.journal.check_new("alice", model, name)


async def test_a_client_keeps_its_adapters_or_hears_that_they_are_gone() -> None:
    place = _Place()
    session = await place.session("alice")
    model = f"{session}:train:0"
    await place.create(model)
    await place.save(model, 1, path="named")
    path = f"tinker://{model}/sampler_weights/named"
    before = await place.open("alice", session, 0, model_path=path)
    await place.journal.delete("alice", path)
    with pytest.raises(InvalidInput, match="or which was deleted"):
        place.ask("alice", before, 0)
    await place.save(model, 2, path="named")
    place.explorer.may.set()
    restarted = _Place()
    restarted.log.stored = place.log.stored
    await restarted.journal.catch_up()
    for one in (place, restarted):
        with pytest.raises(InvalidInput, match="were saved again after this sampling session began"):
            one.ask("alice", before, 0)
    request = place.ask("alice", await place.open("alice", session, 1, model_path=path), 0)["request_id"]
    assert await place.sampling.retrieve("alice", request, 5) == b"answer of 6"


def test_saves_whose_time_was_over_are_forgotten() -> None:
    saves = Saves(2)
    saves.take("old", Saved("alice", "m:1", 1, 10.0, 20.0))
    saves.take("kept", Saved("alice", "m:2", 2, 15.0, 0.0))
    assert saves.find("alice", "old").position == 1
    saves.take("new", Saved("alice", "m:3", 3, 30.0, 0.0))
    with pytest.raises(NotFound, match="old is not known"):
        saves.find("alice", "old")
    assert list(saves.of("alice")) == ["kept", "new"]


async def test_a_prompt_of_the_greatest_length_has_log_probabilities() -> None:
    place = _Place()
    sampler = await place.open("alice", await place.session("alice"))
    whole = {"prompt": {"chunks": [{"tokens": [1] * 8}]}, "sampling_params": {"max_tokens": 1}}
    place.ask("alice", sampler, 0, prompt_logprobs=True, **whole)
    place.ask("alice", sampler, 1, topk_prompt_logprobs=2, **whole)
    with pytest.raises(InvalidInput, match="both together are at most 8"):
        place.ask("alice", sampler, 2, **whole)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "prompt.chunks.0"),
        ({"prompt": {"chunks": [{"tokens": [10]}]}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [1] * 8}]}}, "prompt"),
        ({"sampling_params": {"max_tokens": 6}}, "prompt"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"sampling_params": {"stop": [10]}}, "stop"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs"),
        ({"record_stability_info": True}, "record_stability_info: is True; it serves loss_fn='stable_reinforce'"),
        ({"seq_id": -1}, "seq_id"),
    ],
)
async def test_bad_requests_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    place = _Place()
    sampler = await place.open("alice", await place.session("alice"))
    with pytest.raises(InvalidInput) as refused:
        place.ask("alice", sampler, change.pop("seq_id", 0), **change)
    assert field in str(refused.value)
    assert not place.explorer.asked


async def test_sessions_of_what_cannot_be_sampled_are_refused() -> None:
    place = _Place()
    session, other = await place.session("alice"), await place.session("bob")
    for tenant, given, model, field in (
        ("alice", session, {"base_model": "x"}, "base_model"),
        ("alice", session, {"model_path": "tinker://a/weights/s"}, "model_path"),
        ("alice", session, {"model_path": "s3://x"}, "model_path"),
        ("alice", session, {"model_path": None}, "give one of them"),
        ("alice", other, {"base_model": "base"}, "session"),
    ):
        with pytest.raises((InvalidInput, NotFound), match=field):
            await place.open(tenant, given, **model)


async def test_sessions_whose_clients_are_gone_end_with_their_requests() -> None:
    place = _Place()
    quiet, lively = await place.session("alice"), await place.session("alice")
    signs = Signs(place.journal, 0.5)
    samplers = [await place.open("alice", session) for session in (quiet, lively)]
    asked = [place.ask("alice", sampler, 0)["request_id"] for sampler in samplers]
    ending = asyncio.create_task(signs.end_silent(place.sampling.end))
    try:
        async with asyncio.timeout(10):
            while quiet in place.journal.open_sessions():
                signs.hear(samplers[1])
                await asyncio.sleep(0.02)
            place.explorer.may.set()
            assert await place.sampling.retrieve("alice", asked[1], 5) == b"answer of 0"
    finally:
        ending.cancel()
    assert list(place.journal.open_sessions()) == [lively]
    with pytest.raises(NotFound, match="has ended"):
        await place.sampling.retrieve("alice", asked[0], 1)
    assert (len(place.explorer.asked), place.explorer.cancelled) == (2, 1)


async def test_a_request_that_waited_too_long_says_for_what() -> None:
    server, explorer = grpc.aio.server(), SamplerServicer()  # its engine never starts
    explorer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = SamplerClient(f"127.0.0.1:{port}", 0.5)
    try:
        with pytest.raises(TimedOut, match=r"no samples within 0.5 s; the engine starts, .* or raise sample_minutes"):
            await client.sample(Sample(0, (1, 2), SamplingParams(max_tokens=4), (), False, 0, 0, 0, "alice"))
    finally:
        await client.close()
        await server.stop(None)
