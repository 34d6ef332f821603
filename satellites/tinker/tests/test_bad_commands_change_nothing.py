"""What is refused is not executed, uses its seq_id up, and leaves other tenants alone."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.servers.nats import NatsServer
from support.servers.tinker_stack import BASE, LONGEST, VOCABULARY, HttpTenant, TinkerStack, datum, forward
from trinity.tinker.commands.wire import Datum

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


def _changed(change: dict[str, np.ndarray | None], **fields: Any) -> Datum:
    whole = datum(1)
    inputs = {name: value for name, value in {**whole.inputs, **change}.items() if value is not None}
    return replace(whole, inputs=inputs, **fields)


_NAN = np.full(12, np.nan, np.float32)
_WRONG = {
    "an unknown loss": ([datum(1)], "gspo", {}, "loss_fn"),
    "a number of no loss": ([datum(1)], "cross_entropy", {"beta": 1.0}, "loss_fn_config.beta"),
    "bounds that exclude one": ([datum(1, loss="ppo")], "ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold"),
    "no sequence": ([], "cross_entropy", {}, "data"),
    "no token": ([datum(1, 0)], "cross_entropy", {}, "model_input"),
    "too many tokens": ([datum(1, LONGEST + 1)], "cross_entropy", {}, "model_input"),
    "a token outside": ([_changed({}, tokens=np.full(12, VOCABULARY))], "cross_entropy", {}, "vocabulary"),
    "a target below": ([_changed({"target_tokens": np.full(12, -1)})], "cross_entropy", {}, "target_tokens"),
    "targets of floats": ([_changed({"target_tokens": np.ones(12, np.float32)})], "cross_entropy", {}, "target_tokens"),
    "too few weights": ([datum(2), _changed({"weights": np.ones(11, np.float32)})], "cross_entropy", {}, "data[1]"),
    "no weights": ([_changed({"weights": None})], "cross_entropy", {}, "weights"),
    "a further tensor": ([_changed({"mask": np.ones(12, np.float32)})], "cross_entropy", {}, "mask"),
    "inputs of another loss": ([datum(1)], "importance_sampling", {}, "loss_fn_inputs"),
    "a weight that is no number": ([_changed({"weights": _NAN})], "cross_entropy", {}, "finite"),
    "a matrix of targets": ([_changed({"target_tokens": np.ones((12, 2), np.int64)})], "cross_entropy", {}, "vector"),
}


def test_bad_passes_change_nothing_and_take_their_seq_id(stack: TinkerStack) -> None:
    alice = HttpTenant(stack, "alice")
    model, clean = alice.create(4), alice.create(4, 1)
    seq_id = 0
    for name, (data, loss, config, field) in _WRONG.items():
        seq_id += 1
        body = forward(model, seq_id, data, loss, **config)
        for _ in range(2):  # the same again is refused alike
            answer = alice.answer("forward_backward", body)
            assert answer.status_code == 422, (name, answer.text)
            assert field in answer.json()["error"], name
        assert "error" in alice.result(f"{model}:{seq_id}")
    adam = {"learning_rate": 0.01}
    first = forward(model, seq_id + 1, [datum(1)])
    sent = alice.post("forward_backward", first)
    alice.post("optim_step", {"adam_params": adam, "model_id": model, "seq_id": seq_id + 2})
    again = alice.result(alice.post("forward_backward", forward(model, seq_id + 3, [datum(1)]))["request_id"])
    alice.post("forward_backward", forward(clean, 1, [datum(1)]))
    alice.post("optim_step", {"adam_params": adam, "model_id": clean, "seq_id": 2})
    alone = alice.result(alice.post("forward_backward", forward(clean, 3, [datum(1)]))["request_id"])
    assert again[0][0].tobytes() == alone[0][0].tobytes()
    # A retry is one entry; another body, and a gap, are refused.
    assert alice.post("forward_backward", first) == sent
    for number, body in ((seq_id + 1, [datum(2)]), (seq_id + 5, [datum(1)])):
        answer = alice.answer("forward_backward", forward(model, number, body))
        assert answer.status_code == 422
        assert f"is {number}" in answer.json()["error"]


def test_a_tenant_over_its_quota_gets_429_and_others_go_on(
    tmp_path: Path, nats_server: NatsServer, quickstart_model: Path
) -> None:
    stack = TinkerStack(tmp_path, nats_server, quickstart_model, waiting=3)
    stack.start()
    try:
        alice, bob = HttpTenant(stack, "alice"), HttpTenant(stack, "bob")
        models = {tenant: tenant.create(4) for tenant in (alice, bob)}

        def step(tenant: HttpTenant, number: int) -> int:
            body = {"adam_params": {"learning_rate": 0.01}, "model_id": models[tenant], "seq_id": number}
            return tenant.answer("optim_step", body).status_code

        stack.kill("tenants")
        assert [step(alice, number) for number in (1, 2, 3, 4)] == [200, 200, 200, 429]
        assert step(alice, 3) == 200, "a retry is no further command"
        assert step(bob, 1) == 200
        stack.restart("tinker")  # it knows from the log what waits
        stack.wait("tinker")
        assert step(alice, 4) == 429
        stack.start("tenants")
        assert "metrics" in alice.result(f"{models[alice]}:3")
        assert step(alice, 4) == 200
        assert "metrics" in alice.result(f"{models[alice]}:4")
    finally:
        stack.stop()


def test_the_session_of_a_silent_client_ends(tmp_path: Path, nats_server: NatsServer, quickstart_model: Path) -> None:
    stack = TinkerStack(tmp_path, nats_server, quickstart_model, session_minutes=0.05)
    stack.start()
    try:
        alice = HttpTenant(stack, "alice")
        model = alice.create(4)
        deadline = time.monotonic() + 30
        while "tinker.session.ended" not in stack.output("tinker"):
            assert time.monotonic() < deadline, "the session has not ended"
            time.sleep(0.1)
        assert alice.answer("session_heartbeat", {"session_id": alice.session}).status_code == 410
        step = alice.answer("optim_step", {"adam_params": {}, "model_id": model, "seq_id": 1})
        assert (step.status_code, "its session, which has ended" in step.text) == (404, True)
    finally:
        stack.stop()


def test_a_result_that_is_no_longer_kept_is_told_so_for_good(
    tmp_path: Path, nats_server: NatsServer, quickstart_model: Path
) -> None:
    stack = TinkerStack(tmp_path, nats_server, quickstart_model, result_hours=3 / 3600)
    stack.start()
    try:
        alice = HttpTenant(stack, "alice")
        model = alice.create(4)

        def told() -> dict[str, Any]:
            answer = alice.answer("retrieve_future", {"request_id": f"{model}:0"})
            assert answer.status_code == 200, "after any other status the client would ask again"
            found: dict[str, Any] = answer.json()
            return found

        deadline = time.monotonic() + 30
        while "model_id" in (found := told()):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        text = "its result is not kept, after 0.05 minutes"
        assert (text in found["error"], found["category"]) == (True, "user")
        stack.restart("tinker")  # no result tells it that the command was executed
        stack.wait("tinker")
        found = told()
        assert text in found["error"], found
        body = {"adam_params": {"learning_rate": 0.01}, "model_id": model, "seq_id": 1}
        assert "metrics" in alice.result(alice.post("optim_step", body)["request_id"])
        found = told()
        assert text in found["error"], found
    finally:
        stack.stop()


def test_bad_steps_states_and_bodies_are_refused_by_name(stack: TinkerStack) -> None:
    alice, bob = HttpTenant(stack, "alice"), HttpTenant(stack, "bob")
    model = alice.create(4)
    steps = [
        ({"learning_rate": -1.0}, "learning_rate"), ({"learning_rate": "x"}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"momentum": 0.9}, "momentum"), ({"eps": 0.0}, "eps"),
    ]  # fmt: skip
    for number, (adam, field) in enumerate(steps, start=1):
        answer = alice.answer("optim_step", {"adam_params": adam, "model_id": model, "seq_id": number})
        assert answer.status_code == 422
        assert field in answer.json()["error"]
    others = len(steps) + 1
    fifth = {"session_id": alice.session, "model_seq_id": 5, "base_model": BASE, "lora_config": {"rank": 4}}
    for path, body, status, text in (
        ("optim_step", {"adam_params": {}, "model_id": model}, 422, "seq_id"),
        ("forward_backward", b"\xff\xff\xff", 400, "forward_backward"),
        ("forward_backward", {"model_id": model}, 400, "Content-Type"),
        ("optim_step", {"adam_params": {}, "model_id": f"{model}9", "seq_id": 1}, 404, "not known"),
        ("save_weights", {"model_id": model, "seq_id": others, "path": ".."}, 422, "path"),
        ("create_model", {**fifth, "base_model": "x"}, 422, "not loaded"),
        ("create_model", {**fifth, "lora_config": {"rank": 999}}, 422, "rank"),
        ("create_model", {**fifth, "session_id": "other"}, 404, "session"),
        ("asample", {"num_samples": 1}, 422, "does not sample"),
        ("sessions", {}, 404, "docs/tinker.md"),
    ):  # fmt: skip
        answer = alice.answer(path, body)
        assert (answer.status_code, text in answer.json()["error"]) == (status, True), (path, answer.text)
    # Another tenant neither sees the model nor its results and states.
    saved = alice.result(
        alice.post("save_weights", {"model_id": model, "seq_id": others + 1, "path": "s"})["request_id"]
    )
    for path, body in (
        ("get_info", {"model_id": model}),
        ("retrieve_future", {"request_id": f"{model}:0"}),
        ("optim_step", {"adam_params": {}, "model_id": model, "seq_id": others + 2}),
    ):
        assert bob.answer(path, body).status_code == 404, path
    taken = {"session_id": bob.session, "model_seq_id": 0, "path": saved["path"], "optimizer": False}
    assert "of no model of this tenant" in bob.answer("load_weights", taken).json()["error"]
    assert alice.answer("get_info", {"model_id": model}, **{"X-API-Key": "tml-none"}).status_code == 401
    for number in range(1, 4):
        alice.create(4, number)
    answer = alice.answer("create_model", fifth)
    assert (answer.status_code, "may have" in answer.json()["error"]) == (422, True)
