"""Lines that tests on the shared vLLM engine guard (support/servers/shared_engine.py), and the counter of starts."""

from mutations.mutation import Mutation

_ENGINE = "services/explorer/src/trinity/explorer/engine"
_ON_VLLM = "services/explorer/tests/engine/test_engine_on_real_vllm.py"
_WEIGHTS = "tests/integration/test_weights_on_real_vllm.py"
_AGREE = "tests/integration/test_trainer_and_engine_agree.py"
_WORKFLOWS = "tests/e2e/test_workflows_on_real_parts.py"
_STARTS = "tests/integration/test_starts_are_counted.py"

MUTATIONS = [
    Mutation(
        f"{_ENGINE}/engine.py",
        "temperature=sampling.temperature,",
        "temperature=1.0,",
        f"{_ON_VLLM}::test_logprobs_are_those_of_transformers[0.7]",
    ),
    Mutation(
        f"{_ENGINE}/engine.py",
        "output_kind=RequestOutputKind.FINAL_ONLY",
        "output_kind=RequestOutputKind.CUMULATIVE",
        f"{_ON_VLLM}::test_logprobs_come_once_for_a_whole_response",
    ),
    Mutation(
        f"{_ENGINE}/engine.py",
        "stop=list(sampling.stop) or None,",
        "stop=None,",
        f"{_ON_VLLM}::test_a_response_that_a_stop_string_ends_has_all_its_logprobs",
    ),
    Mutation(
        f"{_ENGINE}/engine.py",
        "if len(prompt_token_ids) + sampling.max_tokens > self.options.max_model_len:",
        "if False:",
        f"{_ON_VLLM}::test_requests_that_do_not_fit_are_refused_by_name",
    ),
    Mutation(
        f"{_ENGINE}/scheduler.py",
        "            self._loads += 1\n",
        "            self._loads += 0\n",
        f"{_ON_VLLM}::test_a_response_carries_a_span_for_every_version_that_sampled_it",
    ),
    Mutation(
        f"{_ENGINE}/engine.py",
        'abandoning = self.llm.collective_rpc("abandon_weight_update")',
        "abandoning = self.llm.resume_generation()",
        f"{_ON_VLLM}::test_a_failed_load_leaves_the_engine_paused_until_a_full_load",
    ),
    Mutation(
        f"{_ENGINE}/scheduler.py",
        "if pause_state is PauseState.PAUSED_ALL:",
        "if False:",
        f"{_WEIGHTS}::test_no_key_value_block_of_old_weights_serves_a_request_that_waited_during_a_load",
    ),
    Mutation(
        f"{_ENGINE}/engine.py",
        "priority=_BEFORE_ALL_OTHERS",
        "priority=0",
        f"{_WEIGHTS}::test_a_canary_does_not_queue_behind_rollouts",
    ),
    Mutation(
        f"{_ENGINE}/pool.py",
        "        await self.loads.usable()\n        async with self.engine_for(prompt_token_ids, sampling.n)",
        "        async with self.engine_for(prompt_token_ids, sampling.n)",
        f"{_WEIGHTS}::test_responses_are_held_back_until_their_weights_are_known_to_be_good",
    ),
    Mutation(
        "services/explorer/src/trinity/explorer/weights/loader.py",
        '        folder, transport = base_folder(base_model), "folder"\n',
        '        return {"files": [], "tensors": []}, "folder"\n',
        f"{_WEIGHTS}::test_version_0_comes_back_from_the_base_models_own_files",
    ),
    Mutation(
        f"{_ENGINE}/worker.py",
        "            _repack_tied_heads(self.model)\n",
        "            pass\n",
        f"{_WEIGHTS}::test_a_canary_catches_tied_embeddings_that_are_not_reloaded",
    ),
    Mutation(
        f"{_ENGINE}/worker.py",
        "Lora.of(update.lora)",
        'Lora.of({**update.lora, "alpha": update.lora["rank"]})',
        f"{_AGREE}::test_every_version_is_the_base_and_its_own_adapters_forward_and_back",
    ),
    Mutation(
        f"{_ENGINE}/engine.py",
        'await _within(_CALL_SECONDS, "vLLM\'s answer", self.llm.init_weight_transfer_engine(request))',
        "pass",
        f"{_AGREE}::test_a_group_sends_the_adapters_and_each_engine_merges_them",
    ),
    Mutation(
        f"{_ENGINE}/engine.py",
        "in found[prompt_length:]]",
        "in found[prompt_length - 1 : -1]]",
        f"{_WORKFLOWS}::test_every_trained_token_has_the_log_probability_it_has_in_its_conversation",
    ),
    Mutation(
        "tests/support/plugin/starts/sitecustomize.py",
        '        "vllm.v1.engine.core_client": _count_engines,\n',
        "",
        f"{_STARTS}::test_a_start_in_a_child_that_is_killed_counts[engines]",
    ),
    Mutation(
        "tests/support/plugin/starts/__init__.py",
        '    os.environ["PYTHONPATH"] = ',
        "    _ = ",
        f"{_STARTS}::test_a_start_in_a_child_that_is_killed_counts[trainers]",
    ),
]
