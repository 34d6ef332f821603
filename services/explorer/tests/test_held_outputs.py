"""Which outputs wait in the engine core for the end of their response, and what the last one carries."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import LogprobsLists

from trinity.explorer.engine.held_outputs import HoldsOutputs


class Scheduler:
    """The part of vLLM's that matters here: it slices every request's share, and some end."""

    def __init__(self, requests: dict[str, Any]) -> None:
        self.requests = requests
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def update_from_output(self, counts: dict[str, int], output: Any) -> dict[int, Any]:
        made = []
        for index, name in enumerate(output.req_ids):
            request = self.requests[name]
            request.output_token_ids.extend([7] * counts[name])
            ends = len(request.output_token_ids) >= request.length
            if ends:
                del self.requests[name]
            part = output.logprobs.slice_request(index, counts[name])
            ended = "length" if ends else None
            made.append(SimpleNamespace(request_id=name, new_token_ids=[7], new_logprobs=part, finish_reason=ended))
        return {0: SimpleNamespace(outputs=made)}


class Holding(HoldsOutputs, Scheduler):
    pass


def request(length: int, **sampling: Any) -> Any:
    asked = {"num_logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY, "stop": [], **sampling}
    return SimpleNamespace(sampling_params=SimpleNamespace(**asked), output_token_ids=[], length=length)


def step(scheduler: Holding, values: list[float], counts: dict[str, int], starts: list[int] | None = None) -> Any:
    rows = np.array(values, np.float32)[:, None]
    lists = LogprobsLists(np.full(rows.shape, 7, np.int32), rows, np.ones(len(rows), np.int32), starts)
    output = SimpleNamespace(logprobs=lists, req_ids=list(counts))
    return {o.request_id: o.new_logprobs for o in scheduler.update_from_output(counts, output)[0].outputs}


def test_the_last_output_carries_the_whole_response_and_no_other_is_sent() -> None:
    scheduler = Holding({"long": request(3), "short": request(1)})
    first = step(scheduler, [-1.0, -2.0], {"long": 1, "short": 1})
    assert set(first) == {"short"}
    assert first["short"].logprobs.tolist() == [[-2.0]]
    assert step(scheduler, [-3.0], {"long": 1}) == {}
    last = step(scheduler, [-4.0], {"long": 1})["long"]
    assert last.logprobs.tolist() == [[-1.0], [-3.0], [-4.0]]
    assert last.logprob_token_ids.tolist() == [[7], [7], [7]]


def test_every_token_says_how_many_loads_came_before_it() -> None:
    scheduler = Holding({"waits": request(4), "streams": request(4, output_kind=RequestOutputKind.DELTA)})
    both = {"waits": 1, "streams": 1}
    streamed = [step(scheduler, [-1.0, -2.0], both)["streams"]]
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    streamed.append(step(scheduler, [-1.0, -2.0], both)["streams"])  # was under way
    scheduler.set_pause_state(PauseState.PAUSED_ALL)  # a load failed, another one is tried
    scheduler.set_pause_state(PauseState.UNPAUSED)
    streamed.append(step(scheduler, [-1.0, -2.0], both)["streams"])
    scheduler.set_pause_state(PauseState.UNPAUSED)
    found = step(scheduler, [-1.0, -2.0], both)
    streamed.append(found["streams"])
    assert found["waits"].sampled_token_ranks.tolist() == [0, 0, 1, 1]
    assert [part.sampled_token_ranks.tolist() for part in streamed] == [[0], [0], [1], [1]]


def test_several_tokens_of_a_step_are_each_requests_own() -> None:
    scheduler = Holding({"a": request(2), "b": request(3)})
    found = step(scheduler, [-1.0, -2.0, -3.0, -4.0, -5.0], {"a": 2, "b": 3}, [0, 2, 5])
    assert found["a"].logprobs[:, 0].tolist() == [-1.0, -2.0]
    assert found["b"].logprobs[:, 0].tolist() == [-3.0, -4.0, -5.0]


def test_who_reads_along_gets_every_token_at_once() -> None:
    readers = {
        "streams": request(3, output_kind=RequestOutputKind.DELTA),
        "stops at a text": request(3, stop=["end"]),
        "wants the best five": request(3, num_logprobs=5),
    }
    found = step(Holding(dict(readers)), [-1.0, -2.0, -3.0], dict.fromkeys(readers, 1))
    assert [found[name].logprobs.tolist() for name in readers] == [[[-1.0]], [[-2.0]], [[-3.0]]]
    assert found["wants the best five"].sampled_token_ranks.tolist() == [1]
