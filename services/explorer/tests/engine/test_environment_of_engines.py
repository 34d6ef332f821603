"""What vLLM's child processes are told while an engine starts, and that nothing of it stays."""

import importlib.util
import os
from typing import Any

import pytest

from trinity.explorer.engine.start import _arguments_of, _environment, also_stop_at, check_packages
from trinity.explorer.types import FOUR_BIT, EngineOptions
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

INVARIANT = "VLLM_BATCH_INVARIANT"
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"  # torch's watch over one group would end the engine for another's errors


def test_torch_does_not_end_an_engine_for_a_broken_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DUMP, raising=False)
    with _environment(EngineOptions(model="m", device="cuda", max_model_len=64), "3"):
        assert (os.environ[DUMP], os.environ["CUDA_VISIBLE_DEVICES"]) == ("0", "3")
    assert DUMP not in os.environ


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP, "1")
    with _environment(EngineOptions(model="m", device="cuda", max_model_len=64), None):
        assert os.environ[DUMP] == "1"


@pytest.mark.parametrize(
    ("device", "said", "sequences"), [("cpu", None, 1), ("cuda", "1", 64)], ids=["one at a time", "batch-invariant"]
)
def test_a_reproducible_engine_does_not_depend_on_its_batches(
    device: str, said: str | None, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INVARIANT, raising=False)
    options = EngineOptions(model="m", device=device, max_model_len=64, max_num_seqs=64, reproducible=True)
    with _environment(options, None):
        assert os.environ.get(INVARIANT) == said
    given = _arguments_of(options)
    assert (given["max_num_seqs"], given["enable_prefix_caching"]) == (sequences, False)
    assert given.get("attention_backend") == (None if device == "cpu" else "TRITON_ATTN")
    plain = _arguments_of(EngineOptions(model="m", device=device, max_model_len=64))
    assert "attention_backend" not in plain  # vLLM knows which serves a model: Gemma 3 and latent attention need others


def test_an_engine_on_a_cpu_leaves_a_core_and_starts_no_process_for_its_only_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3})
    options = EngineOptions(model="m", device="cpu", max_model_len=64)
    with _environment(options, None):
        assert os.environ["OMP_NUM_THREADS"] == "2"
    assert _arguments_of(options)["distributed_executor_backend"] is UniProcExecutor


def test_a_reproducible_engine_is_batch_invariant_whatever_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INVARIANT, "0")
    for reproducible, said in ((True, "1"), (False, "0")):
        with _environment(EngineOptions("m", "cuda", 64, reproducible=reproducible), None):
            assert os.environ[INVARIANT] == said


@pytest.mark.parametrize(("given", "known"), [({}, []), ({"eos_token_id": 3}, [3]), ({"eos_token_id": [3, 5]}, [3, 5])])
def test_the_end_of_a_turn_ends_samples_as_an_eos_token_does(given: dict[str, Any], known: list[int]) -> None:
    from vllm import SamplingParams

    also_stop_at(7, given)
    for ignore in (False, True):
        sampling = SamplingParams(ignore_eos=ignore)
        sampling.update_from_generation_config(given, 3)
        assert sorted(sampling.stop_token_ids or []) == ([] if ignore else sorted({*known, 7} - {3}))


def test_a_base_of_four_bits_has_its_own_loader_and_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(model="m", device="cuda", max_model_len=64, base_in_four_bits=True)
    assert _arguments_of(options)["load_format"] == FOUR_BIT
    assert "load_format" not in _arguments_of(EngineOptions(model="m", device="cuda", max_model_len=64))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if "bits" in name else found(name, *rest))
    with pytest.raises(InvalidInput, match=r"load_in_4bit: is true, and explorers need bitsandbytes too; `pip install"):
        check_packages(options)
