"""Block hashes across a pause, on vLLM's own requests: no block from before it is shared, later ones are again."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from trinity.explorer.engine.scheduler import InvalidatePrefixCacheOnPause, make_scheduler

pytestmark = pytest.mark.core

BLOCK = 4
PROMPT = list(range(10))


class Plain:
    """The part of vLLM's scheduler that is used."""

    def __init__(self, **arguments: Any) -> None:
        self.requests: dict[str, Request] = {}
        self.state = PauseState.UNPAUSED

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.state = pause_state

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request


class Forgetful(InvalidatePrefixCacheOnPause, Plain):
    pass


def request(name: str, computed: int = 0, prompt: list[int] | None = None) -> Request:
    made = Request(
        name, prompt or PROMPT, SamplingParams(max_tokens=8), None, cache_salt="load1",
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )  # fmt: skip
    made.num_computed_tokens = computed
    return made


@pytest.fixture
def scheduler() -> Forgetful:
    init_none_hash(sha256)
    return Forgetful()


def add(scheduler: Forgetful, name: str, computed: int = 0, prompt: list[int] | None = None) -> list[bytes]:
    made = request(name, prompt=prompt)
    scheduler.add_request(made)
    made.num_computed_tokens = computed
    return made.block_hashes  # type: ignore[return-value]


def pause(scheduler: Forgetful) -> None:
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.state is PauseState.PAUSED_ALL
    scheduler.set_pause_state(PauseState.UNPAUSED)


def test_requests_of_one_salt_share_before_and_after_a_pause_and_not_across(scheduler: Forgetful) -> None:
    first, second = add(scheduler, "a"), add(scheduler, "b")
    assert first == second
    before = list(first)
    pause(scheduler)
    assert first == second, "what waited can no longer be shared"
    assert not set(before) & set(first)
    late = add(scheduler, "late")  # on its way during the load, with the old salt
    assert not set(before) & set(late)
    again = list(first)
    pause(scheduler)
    assert not {*before, *again} & set(first)


@pytest.mark.parametrize("computed", [1, 4, 9])
def test_a_request_that_ran_across_a_pause_shares_no_block(scheduler: Forgetful, computed: int) -> None:
    running, other = add(scheduler, "running", computed), add(scheduler, "other", computed)
    waiting, before = add(scheduler, "waiting"), list(running)
    pause(scheduler)
    for name in ("running", "other", "waiting"):
        scheduler.requests[name].append_output_token_ids(list(range(50, 60)))
    assert len(running) == len(before) + 3
    for shared in (
        other,
        waiting,
        before,
        add(scheduler, "new"),
        add(scheduler, "long", prompt=[*PROMPT, *range(50, 60)]),
    ):
        assert not set(running) & set(shared)


def test_a_prompt_shorter_than_a_block_is_kept_apart_too(scheduler: Forgetful) -> None:
    short = add(scheduler, "short", 2, [1, 2])
    pause(scheduler)
    scheduler.requests["short"].append_output_token_ids([3, 4])
    assert len(short) == 1
    assert not set(short) & set(add(scheduler, "new", prompt=[1, 2, 3, 4]))


def test_a_vllm_that_cannot_be_patched_is_refused_with_the_reason() -> None:
    class Config:
        scheduler_config: Any = None
        scheduler_cls: Any = "ours"

        def get_scheduler_cls(self) -> type:
            return object

    config = Config()
    config.scheduler_config = config
    with pytest.raises(
        RuntimeError, match=r"no set_pause_state and no add_request and no update_from_output and .* vLLM 0\.26"
    ):
        make_scheduler(vllm_config=config)


def test_features_of_images_are_shared_like_blocks_unless_the_worker_has_them(scheduler: Forgetful) -> None:
    def with_image(name: str) -> Request:
        made = request(name)
        made.mm_features = [MultiModalFeatureSpec(None, "image", "digest", PlaceholderRange(0, 1))]
        scheduler.add_request(made)
        return made

    waiting, running, preempted = (with_image(name) for name in ("waiting", "running", "preempted"))
    before = {made.mm_features[0].identifier for made in (waiting, running, preempted)}
    assert len(before) == 1
    running.num_computed_tokens = 3
    preempted.num_preemptions = 1
    pause(scheduler)
    assert {running.mm_features[0].identifier, preempted.mm_features[0].identifier} == before
    late = with_image("late")
    assert not {waiting.mm_features[0].identifier, late.mm_features[0].identifier} & before
