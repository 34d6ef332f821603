"""Which outputs are deferred in the engine core until their response ends, and what the last one carries."""

from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams as VllmSampling
from vllm.engine.arg_utils import EngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from trinity.explorer.engine import scheduler as scheduler_module
from trinity.explorer.engine.scheduler import DeferredOutputs, WholeLogprobs, make_scheduler
from trinity.explorer.engine.start import config_of
from trinity.explorer.types import UNREAD_LOGPROBS, EngineOptions

pytestmark = pytest.mark.core


class Scheduler:
    """The part of vLLM's that matters here: it makes an output for every request, and some end."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def update_from_output(self, counts: dict[str, int], output: Any) -> dict[int, Any]:
        assert output.logprobs is None, "it would slice them for every token"
        made = []
        for name in output.req_id_to_index:
            request, tokens = self.requests[name], [7] * counts[name]
            request.output_token_ids.extend(tokens)
            ends = len(request.output_token_ids) >= request.length
            if ends:
                del self.requests[name]
            ended = "length" if ends else None
            made.append(SimpleNamespace(request_id=name, new_token_ids=tokens, new_logprobs=None, finish_reason=ended))
        return {0: SimpleNamespace(outputs=made, finished_requests=None, scheduler_stats=None)}


class Holding(DeferredOutputs, Scheduler):
    pass


def holding(requests: dict[str, Any]) -> Holding:
    scheduler = Holding()
    for name, made in requests.items():
        made.request_id = name
        scheduler.add_request(made)
    return scheduler


def request(length: int, **sampling: Any) -> Any:
    asked = {"num_logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY, "stop": [], **sampling}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**asked), output_token_ids=[], length=length, num_computed_tokens=0
    )


def step(scheduler: Holding, values: list[float], counts: dict[str, int], starts: list[int] | None = None) -> Any:
    rows = np.array(values, np.float32)[:, None]
    lists = LogprobsLists(np.full(rows.shape, 7, np.int32), rows, np.ones(len(rows), np.int32), starts)
    output = SimpleNamespace(logprobs=lists, req_id_to_index={name: row for row, name in enumerate(counts)})
    outputs = scheduler.update_from_output(counts, output)
    return {o.request_id: o.new_logprobs for of_client in outputs.values() for o in of_client.outputs}


def test_the_last_output_carries_the_whole_response_and_no_other_is_sent() -> None:
    scheduler = holding({"long": request(3), "short": request(1)})
    first = step(scheduler, [-1.0, -2.0], {"long": 1, "short": 1})
    assert set(first) == {"short"}
    assert first["short"].logprobs.tolist() == [[-2.0]]
    assert step(scheduler, [-3.0], {"long": 1}) == {}
    last = step(scheduler, [-4.0], {"long": 1})["long"]
    assert last.logprobs.tolist() == [[-1.0], [-3.0], [-4.0]]
    assert last.logprob_token_ids.tolist() == [[7], [7], [7]]


def test_every_token_says_how_many_loads_came_before_it() -> None:
    scheduler = holding({"waits": request(4), "streams": request(4, output_kind=RequestOutputKind.DELTA)})
    both = {"waits": 1, "streams": 1}
    streamed = [step(scheduler, [-1.0, -2.0], both)["streams"]]
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    streamed.append(step(scheduler, [-1.0, -2.0], both)["streams"])  # was running at the pause
    scheduler.set_pause_state(PauseState.PAUSED_ALL)  # a load failed, another one is tried
    scheduler.set_pause_state(PauseState.UNPAUSED)
    streamed.append(step(scheduler, [-1.0, -2.0], both)["streams"])
    scheduler.set_pause_state(PauseState.UNPAUSED)
    found = step(scheduler, [-1.0, -2.0], both)
    streamed.append(found["streams"])
    assert found["waits"].sampled_token_ranks.tolist() == [0, 0, 1, 1]
    assert [part.sampled_token_ranks.tolist() for part in streamed] == [[0], [0], [1], [1]]


def test_several_tokens_of_a_step_are_each_requests_own() -> None:
    scheduler = holding({"a": request(2), "b": request(3)})
    found = step(scheduler, [-1.0, -2.0, -3.0, -4.0, -5.0], {"a": 2, "b": 3}, [0, 2, 5])
    assert found["a"].logprobs[:, 0].tolist() == [-1.0, -2.0]
    assert found["b"].logprobs[:, 0].tolist() == [-3.0, -4.0, -5.0]


def test_a_streaming_request_gets_every_token_at_once() -> None:
    readers = {
        "streams": request(3, output_kind=RequestOutputKind.DELTA),
        "stops at a text": request(3, stop=["end"]),
        "wants the best five": request(3, num_logprobs=5),
    }
    found = step(holding(dict(readers)), [-1.0, -2.0, -3.0], dict.fromkeys(readers, 1))
    assert [found[name].logprobs.tolist() for name in readers] == [[[-1.0]], [[-2.0]], [[-3.0]]]
    assert found["wants the best five"].sampled_token_ranks.tolist() == [0], "the loads before it, not vLLM's rank"


def test_the_loads_before_a_token_outlast_vllms_joining_of_outputs() -> None:
    """The sampled token is the second best: joined as dictionaries, its rank would be 2."""
    sampling = VllmSampling(logprobs=2, flat_logprobs=True)
    asked: Any = SimpleNamespace(sampling_params=sampling)
    processor = WholeLogprobs.from_new_request(None, asked)
    values = np.array([[-2.0, -1.0, -2.0]], np.float32)
    for loads in (4, 5):
        processor._update_sample_logprobs(LogprobsLists(np.array([[7, 6, 7]]), values, np.array([loads]), None))
    joined = FlatLogprobs()
    joined.extend(processor.logprobs)
    assert [joined.ranks[start] for start in joined.start_indices] == [4, 5]
    assert [joined.token_ids[start] for start in joined.start_indices] == [7, 7]


def test_no_text_is_decoded_for_log_probabilities_that_no_client_reads() -> None:
    lists = LogprobsLists(np.array([[7], [8]]), np.array([[-1.0], [-2.0]], np.float32), np.array([0, 0]), None)
    tokenizer: Any = object()
    for extra, decodes in ((None, tokenizer), ({UNREAD_LOGPROBS: True}, None)):
        sampling = VllmSampling(logprobs=0, flat_logprobs=True, extra_args=extra)
        asked: Any = SimpleNamespace(sampling_params=sampling)
        processor = WholeLogprobs.from_new_request(tokenizer, asked)
        assert processor.tokenizer is decodes
    processor._update_sample_logprobs(lists)
    assert isinstance(processor.logprobs, FlatLogprobs)
    assert processor.logprobs.logprobs == [-1.0, -2.0]


def test_a_request_without_logprobs_is_passed_on_unchanged() -> None:
    assert step(holding({"a": request(2, num_logprobs=None)}), [-1.0], {"a": 1}) == {"a": None}


def test_a_step_without_output_sends_no_message() -> None:
    scheduler = holding({"a": request(2)})
    lists = LogprobsLists(np.array([[7]]), np.array([[-1.0]], np.float32), np.array([1]), None)
    output = SimpleNamespace(logprobs=lists, req_id_to_index={"a": 0})
    assert scheduler.update_from_output({"a": 1}, output) == {}


def test_responses_of_aborted_requests_are_released() -> None:
    scheduler = holding({})
    for number in range(5000):
        made = request(9)
        made.request_id = str(number)
        scheduler.add_request(made)
        del scheduler.requests[made.request_id]
    assert len(scheduler._responses) <= 1001


def vllm_config(model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """As a GPU's engine has it: a CPU's has some of it turned off at the very end."""
    monkeypatch.setattr(current_platform, "check_and_update_config", lambda config: None)
    return config_of(EngineOptions(str(model), "cpu", 128, **options))


def differences(one: Any, other: Any) -> set[str]:
    """Names of the settings that two VllmConfigs differ in."""
    found = {name for name in vars(one) if repr(getattr(one, name)) != repr(getattr(other, name))}
    parts = {name for name in found if is_dataclass(getattr(one, name)) and is_dataclass(getattr(other, name))}
    return (found - parts).union(*(differences(getattr(one, name), getattr(other, name)) for name in parts))


def test_an_engine_is_set_as_vllms_own_for_throughput_is(
    quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences and tokens of a step, scheduling while the GPU computes, CUDA graphs, model runner."""
    ours = vllm_config(quickstart_model, monkeypatch)
    plain = EngineArgs(
        str(quickstart_model), dtype="float32", max_model_len=128, enforce_eager=True, disable_log_stats=True,
        logprobs_mode="processed_logprobs", generation_config="vllm",
    ).create_engine_config(UsageContext.LLM_CLASS)  # fmt: skip
    wanted = {"scheduler_cls", "policy", "worker_extension_cls", "weight_transfer_config", "instance_id"}
    wanted |= {"distributed_executor_backend"}  # on CPUs
    assert differences(ours, plain) <= wanted
    assert ours.scheduler_config.async_scheduling
    assert ours.max_concurrent_batches == 2
    assert vllm_config(quickstart_model, monkeypatch, max_num_seqs=7).scheduler_config.max_num_seqs == 7


def real_scheduler(config: Any) -> Any:
    """vLLM's for steps that overlap, with ours mixed in."""
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = 16, 200
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(200, [], [KVCacheGroupSpec(["layer"], layer)])
    return make_scheduler(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        log_stats=False, block_size=16, hash_block_size=16,
    )  # fmt: skip


def sampled_by(scheduled: Any, weights: int) -> ModelRunnerOutput:
    """One token for every request: its id and its log-probability name the weights."""
    names = list(scheduled.num_scheduled_tokens)
    ids = np.full((len(names), 1), weights)
    lists = LogprobsLists(ids, np.float32(-weights) * np.ones_like(ids, np.float32), np.ones(len(names)), None)
    rows = {name: row for row, name in enumerate(names)}
    return ModelRunnerOutput(names, rows, ids.tolist(), lists)


def test_steps_under_way_at_a_pause_are_by_the_weights_before(
    quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On vLLM's scheduler, which has two steps under way at any time: one is under way when the pause comes."""
    scheduler = real_scheduler(vllm_config(quickstart_model, monkeypatch))
    assert isinstance(scheduler, AsyncScheduler)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    for number, length in enumerate((3, 6, 9)):
        sampling = VllmSampling(
            max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        scheduler.add_request(Request(f"r{number}", [1, 2, 3], sampling, None, block_hasher=hasher))
    ended: dict[str, Any] = {}

    def finish(scheduled: Any, weights: int) -> None:
        for of_client in scheduler.update_from_output(scheduled, sampled_by(scheduled, weights)).values():
            ended.update({output.request_id: output for output in of_client.outputs})

    under_way = [scheduler.schedule()]
    for weights in (0, 1):
        for _ in range(4 if weights == 0 else 9):
            under_way.append(scheduler.schedule())
            finish(under_way.pop(0), weights)
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert not scheduler.schedule().num_scheduled_tokens
        finish(under_way.pop(0), weights)
        scheduler.set_pause_state(PauseState.UNPAUSED)
        under_way.append(scheduler.schedule())
    assert {name: output.new_token_ids for name, output in ended.items()} == {
        "r0": [0] * 3, "r1": [0] * 5 + [1], "r2": [0] * 5 + [1] * 4,
    }  # fmt: skip
    for output in ended.values():
        assert output.new_logprobs.sampled_token_ranks.tolist() == output.new_token_ids
        assert (-output.new_logprobs.logprobs[:, 0]).tolist() == output.new_token_ids


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_a_prompt_read_across_a_load_makes_the_first_token_the_older_weights(
    quickstart_model: Path, monkeypatch: pytest.MonkeyPatch, kind: RequestOutputKind
) -> None:
    """On vLLM's scheduler: of three prompts, one is read at once, one in two steps, one waits until after the load."""
    config = vllm_config(quickstart_model, monkeypatch)
    config.scheduler_config.max_num_batched_tokens = 64
    scheduler = real_scheduler(config)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    for name, length in {"at once": 40, "in parts": 60, "later": 20}.items():
        sampling = VllmSampling(max_tokens=3, ignore_eos=True, logprobs=0, detokenize=False, output_kind=kind)
        scheduler.add_request(Request(name, list(range(1, length + 1)), sampling, None, block_hasher=hasher))
    loads: dict[str, list[int]] = {}

    def step(weights: int) -> None:
        scheduled = scheduler.schedule()
        output = sampled_by(scheduled, weights)
        for name, row in output.req_id_to_index.items():
            if scheduler.requests[name].num_computed_tokens < scheduler.requests[name].num_prompt_tokens:
                output.sampled_token_ids[row] = []
        for of_client in scheduler.update_from_output(scheduled, output).values():
            for found in of_client.outputs:
                loads.setdefault(found.request_id, []).extend(found.new_logprobs.sampled_token_ranks.tolist())

    step(0)
    assert 0 < scheduler.requests["in parts"].num_computed_tokens < 60
    for weights in (1, 2):  # the second load comes when all prompts were read
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        scheduler.set_pause_state(PauseState.UNPAUSED)
        step(weights)
    step(2)
    step(2)
    assert loads == {"at once": [0, 1, 2], "in parts": [0, 2, 2], "later": [1, 2, 2]}


def test_the_scheduler_reports_its_load_now_and_then(quickstart_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the messages of a few steps, although vLLM's own statistics are off."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(scheduler_module, "time", clock)
    scheduler = real_scheduler(vllm_config(quickstart_model, monkeypatch, max_num_seqs=2))
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    for number in range(3):
        sampling = VllmSampling(max_tokens=9, ignore_eos=True, detokenize=False)
        scheduler.add_request(Request(f"r{number}", [1, 2, 3], sampling, None, block_hasher=hasher))

    def step(seconds: float) -> list[Any]:
        clock.now += seconds
        scheduled = scheduler.schedule()
        sent = scheduler.update_from_output(scheduled, sampled_by(scheduled, 0))
        return [found.scheduler_stats for found in sent.values() if found.scheduler_stats is not None]

    (first,) = step(0.0)
    assert (first.num_running_reqs, first.num_waiting_reqs) == (2, 1)
    assert first.kv_cache_usage == pytest.approx(2 / 199)  # one block each; vLLM keeps one for itself
    assert step(0.5) == []
    assert len(step(0.5)) == 1
