"""The official client samples the base model and the adapters that tenants saved, with every parameter that it has."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.servers.tinker_stack import BASE, LONGEST, TinkerStack
from trinity.api.explorer.v1 import sampler_pb2, sampler_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import Unauthenticated

AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
tinker = pytest.importorskip("tinker")

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

_PROMPT = [ord(letter) for letter in "12+34="]
_GREEDY = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def _service(stack: TinkerStack, name: str = "alice"):
    return tinker.ServiceClient(base_url=stack.url, api_key=stack.keys[name])


def _input(tokens=tuple(_PROMPT)):
    return tinker.ModelInput.from_ints(list(tokens))


def _sample(client, n: int = 1, prompt=None, **settings):
    options = {name: settings.pop(name) for name in list(settings) if "logprobs" in name}
    params = tinker.SamplingParams(**{"max_tokens": 8, **settings})
    return client.sample(_input() if prompt is None else prompt, n, params, **options).result(timeout=120)


def _train(client, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 250, 12).tolist()
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 11}
    data = [tinker.Datum(model_input=_input(tokens[:-1]), loss_fn_inputs=inputs)]
    for _ in range(steps):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()


def _of_trainer(client, tokens: list[int]) -> np.ndarray:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinker.Datum(model_input=_input(tokens[:-1]), loss_fn_inputs=inputs)
    return np.asarray(client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)


def test_the_base_model_is_sampled_as_the_client_asks(sampling_stack: TinkerStack) -> None:
    service = _service(sampling_stack)
    client = service.create_sampling_client(base_model=BASE).result()
    assert client.get_base_model() == BASE
    rest = tinker.RestClient(base_url=sampling_stack.url, api_key=_key(sampling_stack))
    assert rest.get_sampler(client._sampling_session_id).result().base_model == BASE
    greedy = _sample(client, 3, **_GREEDY)
    assert [one.tokens for one in greedy.sequences] == [greedy.sequences[0].tokens] * 3
    assert len({one.sequence_id for one in greedy.sequences}) == 3
    tokens = greedy.sequences[0].tokens
    assert (len(tokens), greedy.sequences[0].stop_reason, greedy.prompt_logprobs) == (8, "length", None)
    # Seeds, and independent samples.
    assert [_sample(client, 2, seed=7).sequences[i].tokens for i in (0, 1)] == [
        one.tokens for one in _sample(client, 2, seed=7).sequences
    ]
    many = _sample(client, 8)
    assert len({tuple(one.tokens) for one in many.sequences}) > 4
    assert all(len(one.logprobs) == len(one.tokens) and max(one.logprobs) <= 0 for one in many.sequences)
    assert _sample(client, top_k=1).sequences[0].tokens == tokens
    assert _sample(client, top_p=1e-6).sequences[0].tokens == tokens
    # Stops: a token, a text, and none at all.
    third = tokens[2]
    assert _sample(client, **_GREEDY, stop=[third]).sequences[0].tokens == tokens[: tokens.index(third) + 1]
    stopped = _sample(client, **_GREEDY, stop=[third]).sequences[0]
    assert stopped.stop_reason == "stop"
    tokenizer = AutoTokenizer.from_pretrained(sampling_stack.folder / "model")
    drawn = _sample(client, max_tokens=40, seed=3).sequences[0].tokens
    letter, text = next((one, text) for one in drawn if (text := tokenizer.decode([one])).isascii() and len(text) == 1)
    stopped = _sample(client, max_tokens=40, seed=3, stop=text).sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == (drawn[: drawn.index(letter) + 1], "stop")
    assert len(_sample(client, max_tokens=40, temperature=2.0, stop=[]).sequences[0].tokens) == 40
    for bad in ({"temperature": 3.0}, {"stop": [""]}):  # vLLM refuses them
        with pytest.raises(tinker.RequestFailedError, match="sampling_params: "):
            _sample(client, **bad)
    # Without max_tokens a sequence is as long as the model allows.
    whole = client.sample(_input(), 1, tinker.SamplingParams(temperature=0.0, stop=[])).result(timeout=60)
    assert len(whole.sequences[0].tokens) == LONGEST - len(_PROMPT)
    # Log-probabilities of prompts and of the most likely tokens.
    every = _sample(client, 2, temperature=0.5, include_prompt_logprobs=True, topk_prompt_logprobs=3)
    alone = client.compute_logprobs(_input()).result(timeout=60)
    assert every.prompt_logprobs[0] is None
    assert every.prompt_logprobs[1:] == pytest.approx(alone[1:], abs=1e-4), "at temperature 1, whatever the request's"
    assert every.topk_prompt_logprobs[0] is None
    for found, row, token in zip(alone[1:], every.topk_prompt_logprobs[1:], _PROMPT[1:], strict=True):
        assert len(row) == 3 and [value for _, value in row] == sorted((value for _, value in row), reverse=True)
        assert row[0][1] >= found - 1e-4 and dict(row).get(token, found) == pytest.approx(found, abs=1e-4)
    last = client.compute_logprobs(_input(), prompt_logprobs_last_n=2).result(timeout=60)
    assert last[:-2] == [None] * (len(_PROMPT) - 2)
    assert last[-2:] == pytest.approx(alone[-2:], abs=1e-4)
    full = client.compute_logprobs(_input([*_PROMPT] * 10 + [1] * 4)).result(timeout=60)
    assert len(full) == LONGEST and full[1 : len(_PROMPT)] == pytest.approx(alone[1:], abs=1e-4)
    top = _sample(client, **_GREEDY, topk_sample_logprobs=2).sequences[0]
    assert [row[0][0] for row in top.topk_logprobs] == top.tokens
    assert [row[0][1] for row in top.topk_logprobs] == pytest.approx(top.logprobs)
    # Copies in other processes, by pickle and by a handle.
    copies = [pickle.loads(pickle.dumps(client))]
    copies.append(tinker.SamplingClient.from_sampler_handle(client.get_sampler_handle(), api_key=_key(sampling_stack)))
    for copy in copies:
        assert _sample(copy, **_GREEDY).sequences[0].tokens == tokens


def _key(stack: TinkerStack) -> str:
    return stack.keys["alice"]


def test_adapters_of_several_ranks_and_tenants_are_sampled_apart(sampling_stack: TinkerStack) -> None:
    services = {name: _service(sampling_stack, name) for name in ("alice", "bob")}
    ranks = {"alice": 4, "bob": 16}
    trained = {n: services[n].create_lora_training_client(base_model=BASE, rank=ranks[n]).result() for n in ranks}
    tokens = [*_PROMPT, 40, 50, 60]
    clients, expected, paths = [], [], []
    for round_, name in ((1, "alice"), (2, "bob"), (3, "alice")):  # three versions, and room for two
        _train(trained[name], 6, round_)
        path = trained[name].save_weights_for_sampler(f"round-{round_}").result().path
        expected.append(_of_trainer(trained[name], tokens))
        clients.append(services[name].create_sampling_client(model_path=path).result())
        paths.append(path)
    expected.append(expected[-1])
    clients.append(trained["alice"].save_weights_and_get_sampling_client().result())

    def found(client) -> list[float | None]:
        return client.compute_logprobs(_input(tokens)).result(timeout=120)[1:]

    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            for values, due in zip(threads.map(found, clients * 2), expected * 2, strict=True):
                assert np.abs(np.asarray(values) - due).max() < 1e-3
    assert min(np.abs(expected[a] - expected[b]).max() for a, b in ((0, 1), (0, 2), (1, 2))) > 0.1
    # What the engine samples has the log-probabilities that the trainer computes: the first RL ratio is 1.
    drawn = _sample(clients[1], max_tokens=12).sequences[0]
    due = _of_trainer(trained["bob"], [*_PROMPT, *drawn.tokens])[len(_PROMPT) - 1 :]
    assert np.abs(np.asarray(drawn.logprobs) - due).max() < 1e-3
    # Inflight clients follow the newest save of their model; snapshots do not.
    flying = trained["bob"].save_weights_and_get_sampling_client(kind="inflight").result()
    assert np.abs(np.asarray(found(flying)) - expected[1]).max() < 1e-3
    _train(trained["bob"], 6, 5)
    trained["bob"].save_weights_and_get_sampling_client(kind="inflight").result()
    newer = _of_trainer(trained["bob"], tokens)
    assert np.abs(newer - expected[1]).max() > 0.1
    assert np.abs(np.asarray(found(flying)) - newer).max() < 1e-3
    assert np.abs(np.asarray(found(clients[1])) - expected[1]).max() < 1e-3
    # Nobody samples by another tenant's adapters, nor learns that they exist.
    for path in (paths[0], paths[0].replace("round-1", "none"), "tinker://x:train:0/sampler_weights/y"):
        with pytest.raises(tinker.UnprocessableEntityError, match="which no save_weights_for_sampler returned"):
            services["bob"].create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="choose another"):
        trained["alice"].save_weights_for_sampler("round-1").result()
    assert _sample(clients[0], **_GREEDY).sequences


def test_bad_requests_are_the_clients_errors_and_others_go_on(sampling_stack: TinkerStack) -> None:
    service = _service(sampling_stack)
    client = service.create_sampling_client(base_model=BASE).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="not loaded here"):
        service.create_sampling_client(base_model="other/model").result()
    long, last = _input([1] * LONGEST), _input([1] * (LONGEST - 4))
    outside = _input([1, 262])
    for prompt, settings, text in (
        (long, {}, f"has {LONGEST} tokens"),
        (last, {"max_tokens": 5}, f"at most {LONGEST}"),
        (_input([]), {}, "has 0 tokens"),
        (outside, {}, "token 262"),
        (_input(), {"temperature": -1.0}, "temperature"),
        (_input(), {"top_p": 0.0}, "top_p"),
        (_input(), {"top_k": -2}, "top_k"),
        (_input(), {"max_tokens": 0}, "max_tokens"),
        (_input(), {"stop": [999]}, "stop"),
        (_input(), {"topk_prompt_logprobs": 21}, "topk_prompt_logprobs"),
        (_input(), {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 6}, "prompt_logprobs_last_n"),
        (_input(), {"target_prompt_logprobs": tinker.TensorData(data=[1] * 5, dtype="int64", shape=[5, 1])}, "target"),
    ):
        with pytest.raises(tinker.UnprocessableEntityError, match=text):
            _sample(client, prompt=prompt, **settings)
    with pytest.raises(tinker.UnprocessableEntityError, match="num_samples"):
        _sample(client, 0)
    assert _sample(client, prompt=last, max_tokens=4).sequences
    with pytest.raises(tinker.UnprocessableEntityError, match="record_stability_info"):
        _sample(service.create_sampling_client(base_model=BASE, record_stability_info=True).result())
    with rpc.blocking_channel(sampling_stack.sampler_address, identity=None) as channel:
        stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        with pytest.raises(Unauthenticated):  # another user of the machine
            rpc.ask_blocking(stub.Sample, sampler_pb2.SampleRequest(version=1), seconds=10)
    handle = client.get_sampler_handle()
    other = tinker.SamplingClient.from_sampler_handle(handle, api_key=sampling_stack.keys["bob"])
    with pytest.raises(tinker.NotFoundError, match="is not known"):
        _sample(other)


def test_a_tenant_does_not_wait_for_all_requests_of_another(sampling_stack: TinkerStack) -> None:
    many, one = (
        _service(sampling_stack, name).create_sampling_client(base_model=BASE).result() for name in ("bob", "alice")
    )
    long, last = tinker.SamplingParams(max_tokens=50, stop=[]), tinker.SamplingParams(max_tokens=50, stop=[], seed=1)
    _sample(one)
    waiting = [many.sample(_input(), 32, last if number == 39 else long) for number in range(40)]
    waiting[0].result(timeout=300)  # the others have reached the engine: it has seats for an eighth of them
    one.sample(_input(), 1, long).result(timeout=300)
    done = sum(future.future().done() for future in waiting)
    assert done < 30, f"{done} of 40 requests went before it"
    for future in waiting:
        future.result(timeout=300)
