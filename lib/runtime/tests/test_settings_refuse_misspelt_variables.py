"""Settings of a service: one declaration, unknown names refused."""

import socket

import pytest
from pydantic_settings import SettingsConfigDict

from trinity.runtime.errors import InvalidInput
from trinity.runtime.settings import ServiceSettings, load_settings, reached_at, split_address

pytestmark = pytest.mark.core


class Example(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_EXAMPLE_", extra="forbid", frozen=True)

    size: int = 3


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_EXAMPLE_SIZE", "7")
    assert load_settings(Example).size == 7
    assert load_settings(Example, size=9).size == 9


def test_a_misspelt_name_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_EXAMPLE_SIEZ", "7")
    with pytest.raises(InvalidInput, match=r"TRINITY_EXAMPLE_SIEZ.*did you mean TRINITY_EXAMPLE_SIZE"):
        load_settings(Example)


def test_a_variable_of_trinity_rft_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its YAMLs read TRINITY_BUFFER_PATH, and services inherit it."""

    class Buffer(ServiceSettings):
        model_config = SettingsConfigDict(env_prefix="TRINITY_BUFFER_", extra="forbid", frozen=True)

    monkeypatch.setenv("TRINITY_BUFFER_PATH", "/data/buffer")
    assert load_settings(Buffer) == Buffer()
    monkeypatch.setenv("TRINITY_BUFFER_PATHS", "/data/buffer")
    with pytest.raises(InvalidInput, match="TRINITY_BUFFER_PATHS: is no setting"):
        load_settings(Buffer)


def test_a_wrong_value_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_EXAMPLE_SIZE", "many")
    with pytest.raises(InvalidInput, match="TRINITY_EXAMPLE_SIZE: is 'many'"):
        load_settings(Example)
    monkeypatch.delenv("TRINITY_EXAMPLE_SIZE")
    monkeypatch.setenv("TRINITY_EXAMPLE_LOG_LEVEL", "verbose")
    with pytest.raises(InvalidInput, match=r"TRINITY_EXAMPLE_LOG_LEVEL: is 'verbose': .*DEBUG\|INFO"):
        load_settings(Example)
    monkeypatch.setenv("TRINITY_EXAMPLE_LOG_LEVEL", "debug")
    assert load_settings(Example).log_level == "debug"


@pytest.mark.parametrize("address", ["nowhere", "host:", ":80", "host:99999", "host:port"])
def test_addresses_are_host_and_port(address: str) -> None:
    with pytest.raises(InvalidInput, match="listen"):
        split_address(address, "listen")


def test_others_reach_a_service_at_its_own_address_its_hosts_name_or_what_it_advertises() -> None:
    assert reached_at(Example(listen="127.0.0.1:0"), 7001) == "127.0.0.1:7001"
    for everywhere in ("0.0.0.0:7001", "[::]:7001"):
        assert reached_at(Example(listen=everywhere), 7001) == f"{socket.gethostname()}:7001"
    assert reached_at(Example(listen="0.0.0.0:7001", advertise="10.0.0.1:9"), 7001) == "10.0.0.1:9"
    for wrong in ("10.0.0.1", "10.0.0.1:0"):
        with pytest.raises(InvalidInput, match="advertise"):
            reached_at(Example(advertise=wrong), 7001)
