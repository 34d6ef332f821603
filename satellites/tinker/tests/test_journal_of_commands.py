"""Two gateways on one log accept each command once, and a third one knows what they accepted."""

import pytest

from trinity.runtime.broker import connect
from trinity.runtime.errors import Conflict, DataLoss, Full, InvalidInput, NotFound
from trinity.runtime.names import RunNames
from trinity.tinker.commands.log import CommandLog, Kind, canonical
from trinity.tinker.gateway.journal import Journal, owner_of
from trinity.tinker.gateway.quotas import Quotas
from trinity.tinker.gateway.saves import Saves

pytestmark = pytest.mark.core

_CREATE = canonical({"lora_config": {"rank": 4}})


def _fine() -> None:
    pass


def _bad() -> None:
    raise InvalidInput("loss_fn", "is 'x'; known: y")


async def test_gateways_agree_on_every_seq_id(nats_url: str) -> None:
    async with await connect(nats_url, "test") as broker:
        log = CommandLog(broker, RunNames("journal"))
        await log.open(2**24, 3600)
        one, other = Journal(log, Saves(9)), Journal(log, Saves(9))
        session = await one.open_session("alice", b"{}")
        await other.open_session("bob", b"{}")
        model = f"{session}:train:0"
        for journal in (one, other):  # the second finds it in the log
            assert await journal.submit("alice", model, 0, Kind.CREATE_MODEL, _CREATE, _fine) == f"{model}:0"
        assert await one.submit("alice", model, 1, Kind.OPTIM_STEP, b"first", _fine) == f"{model}:1"
        assert await other.submit("alice", model, 1, Kind.OPTIM_STEP, b"first", _fine) == f"{model}:1"
        with pytest.raises(Conflict, match="is 1, which holds another command"):
            await other.submit("alice", model, 1, Kind.OPTIM_STEP, b"another", _fine)
        with pytest.raises(Conflict, match=r"is 3, and the next one of .* is 2"):
            await one.submit("alice", model, 3, Kind.OPTIM_STEP, b"later", _fine)
        for journal in (one, other):
            with pytest.raises(InvalidInput, match="loss_fn: is 'x'; known: y"):
                await journal.submit("alice", model, 2, Kind.FORWARD_BACKWARD, b"bad", _bad)
        with pytest.raises(NotFound, match="not known"):
            await one.submit("bob", model, 3, Kind.OPTIM_STEP, b"of another", _fine)
        assert await other.submit("alice", model, 3, Kind.OPTIM_STEP, b"later", _fine) == f"{model}:3"
        kinds = [command.kind async for command in log.commands(0, await log.last_command())]
        await one.end_session("alice", session)
        await other.end_session("alice", session)  # once
        assert await log.last_command() == len(kinds) + 1
        with pytest.raises(NotFound, match="not known"):
            await one.end_session("bob", session)
        third = Journal(log, Saves(9))
        await third.catch_up()
        with pytest.raises(NotFound, match="went with its session"):
            await third.submit("alice", model, 4, Kind.OPTIM_STEP, b"late", _fine)
        with pytest.raises(NotFound, match="has ended"):
            third.check_session("alice", session, takes_models=True)
    assert kinds == ["session", "session", "create_model", "optim_step", "refused", "optim_step"]
    assert (third.models[model].tenant, third.models[model].rank, len(third.models[model].digests)) == ("alice", 4, 4)
    assert third.count("alice") == 0


async def test_bodies_of_passes_are_removed_once_they_fill_half_of_their_stream(nats_url: str) -> None:
    async with await connect(nats_url, "test") as broker:
        names = RunNames("bodies")
        log = CommandLog(broker, names)
        await log.open(2**20, 3600)
        journal = Journal(log, Saves(9), Quotas(10**6, 10**9, 3600))
        model = f"{await journal.open_session('alice', b'{}')}:train:0"
        await journal.submit("alice", model, 0, Kind.CREATE_MODEL, _CREATE, _fine)
        for number in range(1, 7):
            await journal.submit("alice", model, number, Kind.FORWARD_BACKWARD, bytes([number]) * 100_000, _fine)
        last, executor = await log.last_command(), CommandLog(broker, names)
        await executor.open(2**20, 3600)
        read = []
        async for command in executor.follow(0):
            read.append(command)
            if command.position == last:
                break
        assert [command.body for command in read[2:]] == [bytes([number]) * 100_000 for number in range(1, 7)]
        with pytest.raises(Full, match=r"the log of commands is full .*; raise log_gib"):
            for number in range(7, 20):
                await journal.submit("alice", model, number, Kind.FORWARD_BACKWARD, b"x" * 100_000, _fine)
        await executor.release(last - 2)
        assert (await broker.state(names.passes_stream)).first_sequence == 5
        again = Journal(log, Saves(9), Quotas(1, 10**9, 3600))
        await again.catch_up()
        assert again.models[model].digests == journal.models[model].digests
        with pytest.raises(Full, match=r"wait, and this one has 1;|commands with \d{6} bytes of this tenant wait"):
            await again.submit("alice", model, len(again.models[model].digests), Kind.OPTIM_STEP, b"y", _fine)
        with pytest.raises(DataLoss, match="the body of command 3 is no longer kept"):
            async for _ in executor.follow(2):
                pass


async def test_a_save_without_a_name_may_be_repeated_under_the_next_number(nats_url: str) -> None:
    """The official client does this when its request has timed out."""
    async with await connect(nats_url, "test") as broker:
        log = CommandLog(broker, RunNames("saves"))
        await log.open(2**20, 3600)
        journal = Journal(log, Saves(9))
        model = f"{await journal.open_session('alice', b'{}')}:train:0"
        await journal.submit("alice", model, 0, Kind.CREATE_MODEL, _CREATE, _fine)
        saves = [
            canonical({"path": None, "sampling_session_seq_id": number, "ttl_seconds": None, "kind": ""})
            for number in (1, 2)
        ]
        for body in saves:
            assert await journal.submit("alice", model, 1, Kind.SAVE_SAMPLER, body, _fine) == f"{model}:1"
        assert await log.last_command() == 3
        again = Journal(log, Saves(9))
        await again.catch_up()
        assert again.models[model].digests == journal.models[model].digests


async def test_a_deleted_save_makes_room_at_every_gateway(nats_url: str) -> None:
    async with await connect(nats_url, "test") as broker:
        log = CommandLog(broker, RunNames("deletes"))
        await log.open(2**20, 3600)
        one, other = Journal(log, Saves(2)), Journal(log, Saves(2))
        model = f"{await one.open_session('alice', b'{}')}:train:0"
        await one.submit("alice", model, 0, Kind.CREATE_MODEL, _CREATE, _fine)
        for number, kind in ((1, Kind.SAVE_WEIGHTS), (2, Kind.SAVE_SAMPLER)):
            body = canonical({"path": "s", "ttl_seconds": None})
            await one.submit("alice", model, number, kind, body, _fine)
        state, adapters = f"tinker://{model}/weights/s", f"tinker://{model}/sampler_weights/s"
        new = {"path": "t", "sampling_session_seq_id": None}
        with pytest.raises(InvalidInput, match=rf"may have \(max_saves\); delete one .* the oldest, {state}"):
            one.check_new("alice", model, new)
        one.check_new("bob", model, new)
        for journal in (one, other):
            await journal.catch_up()
            with pytest.raises(NotFound, match="is not known"):
                await journal.delete("bob", adapters)
        restarted = Journal(log, Saves(2))
        for journal in (other, one, one, restarted):  # once: the others find other's entry, as a client's retry does
            await journal.delete("alice", adapters)
            await restarted.catch_up()
        assert await log.last_command() == 5
        for tenant, path in (("bob", adapters), ("alice", f"{adapters}x")):
            with pytest.raises(NotFound, match="is not known"):
                await restarted.delete(tenant, path)
        one.check_new("alice", model, new)
        with pytest.raises(InvalidInput, match="or which was deleted"):
            one.saved("alice", adapters)
        await one.submit("alice", model, 3, Kind.SAVE_SAMPLER, body, _fine)  # the same name again
        await one.delete("alice", adapters)
        third = Journal(log, Saves(2))
        await third.catch_up()
        assert list(third.saves.of("alice")) == [state]


@pytest.mark.parametrize(
    "path", ["", "m/weights/s", "tinker://m/weights", "tinker://m/sampler_weights/s", "file:///x/weights/s"]
)
def test_a_path_of_no_state_is_refused(path: str) -> None:
    assert owner_of("tinker://m:train:0/weights/s") == "m:train:0"
    with pytest.raises(InvalidInput, match="must be tinker://"):
        owner_of(path)
