"""Two gateways on one log accept each command once, and a third one knows what they accepted."""

import pytest

from trinity.data.tenants.log import CommandLog, Kind, canonical
from trinity.runtime.broker import connect
from trinity.runtime.errors import Conflict, InvalidInput, NotFound
from trinity.runtime.names import RunNames
from trinity.tinker.journal import Journal, owner_of

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
        one, other = Journal(log), Journal(log)
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
        third = Journal(log)
        await third.catch_up()
        with pytest.raises(NotFound, match="went with its session"):
            await third.submit("alice", model, 4, Kind.OPTIM_STEP, b"late", _fine)
        with pytest.raises(NotFound, match="has ended"):
            third.check_session("alice", session, takes_models=True)
    assert kinds == ["session", "session", "create_model", "optim_step", "refused", "optim_step"]
    assert (third.models[model].tenant, third.models[model].rank, len(third.models[model].digests)) == ("alice", 4, 4)
    assert third.count("alice") == 0


@pytest.mark.parametrize(
    "path", ["", "m/weights/s", "tinker://m/weights", "tinker://m/sampler_weights/s", "file:///x/weights/s"]
)
def test_a_path_of_no_state_is_refused(path: str) -> None:
    assert owner_of("tinker://m:train:0/weights/s") == "m:train:0"
    with pytest.raises(InvalidInput, match="must be tinker://"):
        owner_of(path)
