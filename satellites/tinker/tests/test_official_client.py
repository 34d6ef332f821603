"""The official client, unmodified: trains, saves, loads, computes a loss of its own, and raises its own errors."""

import re
from pathlib import Path

import numpy as np
import pytest

from support.servers.tinker_stack import BASE, LONGEST, TinkerStack

tinker = pytest.importorskip("tinker")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


@pytest.fixture
def service(stack: TinkerStack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return tinker.ServiceClient(base_url=stack.url, api_key=stack.keys["alice"])


def _data(weights: float = 1.0) -> list:
    tokens = [1, 5, 9, 2, 30, 4]
    inputs = {"target_tokens": tokens[1:], "weights": np.full(5, weights, np.float32)}
    return [tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]


def _losses(client, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        gradient = client.forward_backward(_data(), "cross_entropy")
        step = client.optim_step(tinker.AdamParams(learning_rate=0.01))
        found.append(gradient.result().metrics["loss:sum"])
        step.result()
    return found


def test_it_trains_saves_and_goes_on_from_the_state(stack: TinkerStack, service) -> None:
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    assert client.get_info().lora_rank == 4
    assert client.get_tokenizer().decode(client.get_tokenizer().encode("1+1")) == "1+1"
    losses = _losses(client, 4)
    assert losses[-1] < losses[0]
    path = client.save_state("after-four", ttl_seconds=3600).result().path
    further = _losses(client, 3)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().lora_rank == 4
    assert _losses(resumed, 3) == further
    client.load_state(path).result()
    assert _losses(client, 1) == further[:1]
    with tinker.ServiceClient(base_url=stack.url, api_key=stack.keys["alice"]) as closed:
        for _ in range(2):  # with those above all models that a tenant may have
            gone = closed.create_training_client_from_state(path).result()
        saved = gone.save_state("of-a-closed-session").result().path
    for _ in range(2):
        again = service.create_training_client_from_state(saved).result()
    assert _losses(again, 1)[0] == further[0]


def test_a_loss_of_the_client_has_the_gradient_of_the_same_loss_here(service) -> None:
    plain = service.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    own = service.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    for _ in range(2):
        plain.forward_backward(_data(), "cross_entropy").result()
        own.forward_backward_custom(_data(), lambda data, logprobs: (-sum(x.sum() for x in logprobs), {})).result()
        for client in (plain, own):
            client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    one, other = (
        c.forward(_data(), "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data for c in (plain, own)
    )
    assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-5


def test_a_tenant_with_all_the_saves_that_it_may_have_deletes_one(stack: TinkerStack, service) -> None:
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    paths = [client.save_state(f"state-{number}", ttl_seconds=3600).result().path for number in range(4)]
    with pytest.raises(tinker.UnprocessableEntityError, match=rf"has the 4 named saves .* the oldest, {paths[0]}"):
        client.save_state("one-more").result()
    assert client.save_state("state-3", overwrite=True).result().path == paths[3]
    with pytest.raises(tinker.UnprocessableEntityError, match="'state-3', under which this model has a save"):
        client.save_state("state-3").result()
    rest, other = (tinker.RestClient(base_url=stack.url, api_key=stack.keys[name]) for name in ("alice", "bob"))
    listed = rest.list_user_checkpoints(limit=3).result()
    assert [one.tinker_path for one in listed.checkpoints] == paths[:0:-1]
    assert (listed.cursor.total_count, listed.checkpoints[0].expires_at) == (4, None)
    assert listed.checkpoints[1].expires_at > listed.checkpoints[1].time
    assert [one.checkpoint_type for one in rest.list_checkpoints(client.model_id).result().checkpoints] == [
        "training"
    ] * 4
    assert other.list_user_checkpoints().result().checkpoints == []
    for tenant, path in ((other, paths[1]), (rest, paths[1].replace("state-1", "none"))):
        with pytest.raises(tinker.NotFoundError, match="is not known"):
            tenant.delete_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    assert client.save_state("one-more").result().path not in paths
    with pytest.raises(tinker.RequestFailedError, match="no such state was saved"):
        client.load_state(paths[1]).result()
    client.load_state(paths[2]).result()


def test_refusals_are_the_clients_errors_and_the_next_command_works(stack: TinkerStack, service) -> None:
    with pytest.raises(tinker.UnprocessableEntityError, match="not loaded here"):
        service.create_lora_training_client(base_model="other/model", rank=4).result()
    client = service.create_lora_training_client(base_model=BASE, rank=4).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="loss_fn: is 'dro'; known are cross_entropy"):
        client.forward_backward(_data(), "dro").result()
    long = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * (LONGEST + 1)),
        loss_fn_inputs={"target_tokens": [1] * (LONGEST + 1), "weights": np.ones(LONGEST + 1, np.float32)},
    )
    with pytest.raises(tinker.UnprocessableEntityError, match=f"must have 1 to {LONGEST}"):
        client.forward_backward([long], "cross_entropy").result()
    with pytest.raises(tinker.UnprocessableEntityError, match="does not sample"):
        client.save_weights_for_sampler("x").result()
    with pytest.raises(tinker.RequestFailedError, match="no such state was saved"):
        client.load_state(f"tinker://{client.model_id}/weights/none").result()
    assert _losses(client, 1)
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=stack.url, api_key="tml-of-nobody").create_lora_training_client(
            BASE, rank=4
        ).result()


def test_the_docs_name_every_method(repository: Path) -> None:
    rows = [line for line in (repository / "docs/tinker.md").read_text().splitlines() if line.startswith("| `")]
    clients = (
        tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient
    )  # fmt: skip
    for kind in clients:
        told = {name for row in rows if f"`{kind.__name__}." in row for name in re.findall(r"\w+", row)}
        public = {name for name in dir(kind) if not name.startswith("_") and not name.endswith("_async")}
        assert {name for name in public if callable(getattr(kind, name))} - told == set()


def test_other_methods_are_refused_by_name(stack: TinkerStack) -> None:
    rest = tinker.RestClient(base_url=stack.url, api_key=stack.keys["bob"])
    assert [one.model_name for one in rest.get_server_capabilities().result().supported_models] == [BASE]
    for call in (rest.list_training_runs, rest.list_sessions, rest.get_current_checkpoint_storage_usage):
        with pytest.raises(tinker.NotFoundError, match="is not served"):
            call().result()
