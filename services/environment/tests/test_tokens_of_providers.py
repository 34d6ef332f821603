"""Tokens of providers: created, used, revoked and expired while the service runs, and never stored."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.fakes.environments.odd_environments import Odd
from support.servers.attaching import Service, serve, until
from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound
from trinity.runtime.trust.attach_tokens import AttachTokens, create_token, read_tokens, revoke_token
from trinity.sdk import AttachRefused, attaching
from trinity.sdk.client import Provider, Tls

pytestmark = pytest.mark.core


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job" / "attach_tokens.json"


@pytest.fixture
async def service(file: Path) -> AsyncIterator[Service]:
    async with serve(token="", tokens_file=file) as running:
        yield running


def _expire(file: Path, name: str) -> None:
    tokens = json.loads(file.read_text())
    for one in tokens:
        if one["name"] == name:
            one["expires_at"] = 1.0
    file.write_text(json.dumps(tokens))


async def _ends_with(provider: Provider) -> str:
    with pytest.raises(AttachRefused) as refused:
        await provider.run()
    return str(refused.value)


async def test_a_token_works_once_it_is_created(service: Service, file: Path) -> None:
    provider = Provider(Odd, address=service.address, token="guess", name="ann-1")
    assert "no provider may attach" in await _ends_with(provider)
    token = create_token(file, "ann", days=1)
    assert "UNAUTHENTICATED: offer.token: is not" in await _ends_with(provider)
    async with attaching(Odd, address=service.address, token=token, name="ann-1"):
        assert service.hub.attachments["ann-1"].token.name == "ann"


@pytest.mark.parametrize("ends", ["revoked", "expired"])
async def test_a_token_that_ends_ends_the_stream_of_its_provider_alone(service: Service, file: Path, ends: str) -> None:
    lost, kept = create_token(file, "ann", days=1), create_token(file, "bob", days=1)
    async with attaching(Odd, address=service.address, token=kept, name="bob-1"):
        provider = Provider(Odd, address=service.address, token=lost, name="ann-1")

        async def end() -> None:
            await until(lambda: "ann-1" in service.hub.attachments)
            if ends == "revoked":
                revoke_token(file, "ann")
            else:
                _expire(file, "ann")

        message, _ = await asyncio.wait_for(asyncio.gather(_ends_with(provider), end()), 30)
        assert "UNAUTHENTICATED: offer.token: the token 'ann'" in message
        assert ends in message
        assert list(service.hub.attachments) == ["bob-1"], "its name is away, so its tasks wait; the other one stays"
        assert f"the token 'ann' {'was' if ends == 'revoked' else 'has'} {ends}" in service.hub.away["ann-1"].reason
    again = await _ends_with(Provider(Odd, address=service.address, token=lost, name="ann-1"))
    assert "UNAUTHENTICATED" in again


async def test_the_name_of_another_token_is_not_taken(service: Service, file: Path) -> None:
    first, second = create_token(file, "ann", days=1), create_token(file, "bob", days=1)
    async with attaching(Odd, address=service.address, token=first, name="games"):
        message = await _ends_with(Provider(Odd, address=service.address, token=second, name="games"))
    assert "named 'games' is attached, and it has another token" in message


def test_the_file_has_digests_and_only_its_owner_reads_it(file: Path) -> None:
    token = create_token(file, "ann", days=2)
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    (stored,) = read_tokens(file)
    assert stored.expires_at - stored.created_at == pytest.approx(2 * 86400)
    with pytest.raises(AlreadyExists, match="'ann'"):
        create_token(file, "ann", days=1)
    with pytest.raises(NotFound, match="'bob'"):
        revoke_token(file, "bob")
    with pytest.raises(InvalidInput, match="name"):
        create_token(file, "a\nb", days=1)


def test_a_damaged_file_stops_the_start_and_changes_nothing_later(file: Path) -> None:
    token = create_token(file, "ann", days=1)
    tokens = AttachTokens("", file)
    found = tokens.find(token)
    assert found is not None
    file.write_text("{damaged")
    assert tokens.problem(found) == "", "what it said last holds"
    with pytest.raises(InvalidInput, match="is no file of attach tokens"):
        AttachTokens("", file)
    file.unlink()
    assert "revoked" in tokens.problem(found)


@pytest.mark.parametrize("address", ["10.0.0.5:7002", "environment:7002", "[2001:db8::1]:7002"])
def test_a_token_does_not_go_unencrypted_to_another_machine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_INSECURE", raising=False)
    with pytest.raises(InvalidInput, match=r"address: is .*, where the token would be sent unencrypted"):
        Provider(Odd, address=address, token="guess")
    Provider(Odd, address=address, token="guess", tls=Tls("tls.crt", "tls.key", "ca.crt"))
    for here in ("127.0.0.1:7002", "localhost:7002", "[::1]:7002", "unix:/run/environment"):
        Provider(Odd, address=here, token="guess")
    monkeypatch.setenv("TRINITY_INSECURE", "1")
    Provider(Odd, address=address, token="guess")
