"""The names of vLLM that the product uses: see private_symbols.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Border:
    """`used_in` names modules of the product, `tests` the files that fail when the behaviour behind a name changes."""

    title: str
    used_in: tuple[str, ...]
    look_at: str
    tests: tuple[str, ...]
    names: tuple[str, ...]


VLLM = (
    Border(
        "vLLM: starting an engine",
        ("trinity.explorer.engine.start",),
        "Fields of EngineArgs that were renamed. Without `LLM_CLASS` AsyncLLM takes 128 sequences on any GPU. "
        "`output_processor` must look up `LogprobsProcessor` as a global of its module, where ours is put.",
        ("services/explorer/tests/engine/test_engine_on_real_vllm.py",),
        (
            "vllm.engine.arg_utils:AsyncEngineArgs",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config(usage_context)",
            "vllm.engine.arg_utils:EngineArgs.worker_extension_cls",
            "vllm.engine.arg_utils:EngineArgs.weight_transfer_config",
            "vllm.engine.arg_utils:EngineArgs.scheduler_cls",
            "vllm.engine.arg_utils:EngineArgs.scheduling_policy",
            "vllm.engine.arg_utils:EngineArgs.logprobs_mode",
            "vllm.engine.arg_utils:EngineArgs.attention_backend",
            "vllm.usage.usage_lib:UsageContext.LLM_CLASS",
            "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config(vllm_config, disable_log_stats)",
            "vllm.v1.engine.async_llm:AsyncLLM.input_processor",
            "vllm.v1.engine.input_processor:InputProcessor.generation_config_fields",
            "vllm.v1.engine.output_processor:LogprobsProcessor",
            "vllm.v1.executor.uniproc_executor:UniProcExecutor",
            "vllm.envs:VLLM_WORKER_MULTIPROC_METHOD",
            "vllm.envs:VLLM_NO_USAGE_STATS",
            "vllm.envs:VLLM_CPU_KVCACHE_SPACE",
        ),
    ),
    Border(
        "vLLM: requests, pauses and the end of an engine",
        ("trinity.explorer.engine.engine", "trinity.explorer.engine.auxiliary", "trinity.explorer.serving.endpoint"),
        "`AsyncLLM.pause_generation`: we call what it calls, without its sleep of 20 ms. `flat_logprobs` chooses "
        "the type that the response processor fills. `AsyncLLM.__del__`: it calls `shutdown` again, which is why "
        "`close` replaces it.",
        (
            "services/explorer/tests/engine/test_engine_on_real_vllm.py",
            "tests/integration/test_weights_on_real_vllm.py",
        ),
        (
            "vllm:SamplingParams",
            "vllm:PoolingParams",
            "vllm:TokensPrompt",
            "vllm.inputs.llm:_PromptOptions.cache_salt",
            "vllm.sampling_params:SamplingParams.flat_logprobs",
            "vllm.sampling_params:SamplingParams.prompt_logprobs",
            "vllm.sampling_params:RequestOutputKind.FINAL_ONLY",
            "vllm.pooling_params:PoolingParams.use_activation",
            "vllm.v1.engine.async_llm:AsyncLLM.generate(prompt, sampling_params, request_id, priority)",
            "vllm.v1.engine.async_llm:AsyncLLM.encode(prompt, pooling_params, request_id)",
            "vllm.v1.engine.async_llm:AsyncLLM.abort(request_id)",
            "vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks",
            "vllm.v1.engine.async_llm:AsyncLLM.engine_core",
            "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async(mode, clear_cache)",
            "vllm.v1.engine.async_llm:AsyncLLM.resume_generation",
            "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc(method, args)",
            "vllm.v1.engine.async_llm:AsyncLLM.init_weight_transfer_engine(request)",
            "vllm.distributed.weight_transfer.base:WeightTransferInitRequest.init_info",
            "vllm.v1.engine.async_llm:AsyncLLM.check_health",
            "vllm.v1.engine.async_llm:AsyncLLM.shutdown(timeout)",
        ),
    ),
    Border(
        "vLLM: images among the tokens of a prompt",
        ("trinity.explorer.engine.engine",),
        "A prompt is rendered with other tokens in place of sampled image tokens, which are put back: the model runner "
        "must find images by the positions of their features, not by the tokens. `limit_mm_per_prompt` costs nothing.",
        ("tests/e2e/vision/test_trainer_and_engine_agree.py",),
        (
            "vllm.inputs.llm:_PromptOptions.multi_modal_data",
            "vllm.inputs.llm:_PromptOptions.multi_modal_uuids",
            "vllm.v1.engine.async_llm:AsyncLLM.renderer",
            "vllm.renderers.base:BaseRenderer.render_cmpl_async(prompts)",
            "vllm.multimodal.inputs:PlaceholderRange.offset",
            "vllm.multimodal.inputs:PlaceholderRange.length",
        ),
    ),
    Border(
        "vLLM: weights into a running model",
        ("trinity.explorer.engine.worker", "trinity.explorer.engine.replay", "trinity.explorer.engine.gpt_oss"),
        "The order of calls in `Worker.update_weights`, and who resets the target and the flag of an update that "
        "failed. `layerwise.py`: which layers a reload passes over (a head tied to the embeddings, on CPUs), and "
        "what it counts while weights arrive. `UnquantizedFusedMoEMethod._setup_kernel`: whether a second load packs "
        "experts for CPUs; packing twice would be as wrong as never. Which models' `load_weights` copies into "
        "parameters without their loaders, as gpt-oss's does. New kinds of `quant_method`, and new layers that derive "
        "one weight from another as `MLA` does: they must not be loaded in place. The canary refuses a version that "
        "was loaded wrongly.",
        (
            "services/explorer/tests/engine/test_loading_in_place.py",
            "services/explorer/tests/engine/test_loading_by_replay.py",
            "tests/integration/test_weights_on_real_vllm.py",
            "tests/integration/test_trainer_and_engine_agree.py",
            "tests/models/test_families_roll_out.py",
            "tests/e2e/test_four_bit_base_in_a_run.py",
        ),
        (
            "vllm.config.load:LoadConfig.load_format",
            "vllm.model_executor.model_loader:register_model_loader(load_format)",
            "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights(model_config, model)",
            "vllm.distributed.weight_transfer:WeightTransferEngineFactory.register_engine(name)",
            "vllm.distributed.weight_transfer:WeightTransferEngineFactory._registry",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.init_info_cls",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.update_info_cls",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.vllm_config",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.model_config",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.model",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.device",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.init_transfer_engine(init_info)",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.start_weight_update",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights(update_info)",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.finish_weight_update",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine.reset_weight_update_target",
            "vllm.distributed.weight_transfer.base:WeightTransferInitInfo",
            "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo",
            "vllm.config.parallel:ParallelConfig.rank",
            "vllm.v1.worker.gpu_worker:Worker.weight_transfer_engine",
            "vllm.v1.worker.gpu_worker:Worker._weight_update_active",
            "vllm.v1.worker.gpu_worker:Worker.update_weights(update_info)",
            "vllm.model_executor.model_loader.reload:initialize_layerwise_reload(model)",
            "vllm.model_executor.model_loader.reload:finalize_layerwise_reload(model, model_config)",
            "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info(layer)",
            "vllm.model_executor.model_loader.reload.layerwise:_layerwise_process(layer, info)",
            "vllm.model_executor.model_loader.reload.meta:materialize_meta_tensor(meta_tensor)",
            "vllm.model_executor.models.gpt_oss:GptOssForCausalLM",
            "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.can_load",
            "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.load_numel",
            "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.loaded_weights",
            "vllm.model_executor.layers.linear:LinearBase.quant_method",
            "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
            "vllm.model_executor.layers.attention.mla_attention:MLAAttention",
            "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
            "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
            "vllm.model_executor.layers.vocab_parallel_embedding:"
            "UnquantizedEmbeddingMethod.process_weights_after_loading(layer)",
            "vllm.model_executor.models.qwen2:Qwen2ForCausalLM.load_weights(weights)",
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
            "UnquantizedFusedMoEMethod.process_weights_after_loading(layer)",
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.moe_kernel",
            "vllm.model_executor.layers.fused_moe.experts.cpu_moe:"
            "CPUUnquantizedExperts.process_weights_after_loading(layer)",
        ),
    ),
    Border(
        "vLLM: unmerged adapters",
        (
            "trinity.explorer.engine.adapters",
            "trinity.explorer.engine.cpu_adapters",
            "trinity.explorer.engine.start",
            "trinity.explorer.engine.worker",
        ),
        "`LRUCacheWorkerLoRAManager.add_adapter`: an adapter without a slot is read from its folder again. "
        "`kv_cache_utils._gen_lora_extra_hash_keys`: what of an adapter is in a block's hash. "
        "`config/lora.py`: the ranks of `MaxLoRARanks`. `punica_cpu.py`: which functions it calls, with what.",
        (
            "services/explorer/tests/engine/test_unmerged_adapters.py",
            "services/explorer/tests/engine/test_adapters_on_a_cpu.py",
        ),
        (
            "vllm.lora.punica_wrapper.punica_cpu:sgmv_shrink",
            "vllm.lora.punica_wrapper.punica_cpu:sgmv_expand",
            "vllm.lora.punica_wrapper.punica_cpu:sgmv_expand_slice",
            "vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink",
            "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand",
            "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand_slice",
            "vllm.lora.request:LoRARequest.lora_int_id",
            "vllm.model_executor.models:ModelRegistry",
            "vllm.model_executor.models.registry:_ModelRegistry.resolve_model_cls(architectures, model_config)",
            "vllm.model_executor.models:supports_lora(model)",
            "vllm.v1.engine.async_llm:AsyncLLM.add_lora(lora_request)",
            "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter(lora_request)",
            "vllm.v1.engine.async_llm:AsyncLLM.remove_lora(lora_id)",
            "vllm.engine.arg_utils:EngineArgs.enable_lora",
            "vllm.engine.arg_utils:EngineArgs.max_loras",
            "vllm.engine.arg_utils:EngineArgs.max_cpu_loras",
            "vllm.engine.arg_utils:EngineArgs.max_lora_rank",
        ),
    ),
    Border(
        "vLLM: experts of every token",
        ("trinity.explorer.engine.routes", "trinity.explorer.engine.scheduler", "trinity.explorer.engine.start"),
        "Whether CPUs have a model runner that records experts itself: then routes.py goes. `execute_model` of the "
        "model runner: tokens of a step lie in the order of `input_batch.req_ids`, and `num_computed_tokens_cpu` still "
        "counts those before the step. On GPUs `take_output` gives rows with each output.",
        ("tests/models/test_replay_closes_the_gap.py",),
        (
            "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model(scheduler_output)",
            "vllm.model_executor.layers.fused_moe.routed_experts_capturer:"
            "RoutedExpertsCapturer.snapshot_routing_data(num_tokens)",
            "vllm.model_executor.layers.fused_moe.routed_experts_capturer:"
            "bind_routed_experts_capturer(model, capturer)",
            "vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",
            "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
            "vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
            "vllm.v1.request:Request.num_tokens",
            "vllm.v1.engine:EngineCoreOutput.routed_experts",
            "vllm.outputs:CompletionOutput.routed_experts",
            "vllm.engine.arg_utils:EngineArgs.enable_return_routed_experts",
            "vllm.engine.arg_utils:EngineArgs.additional_config",
        ),
    ),
    Border(
        "vLLM: the scheduler and whole responses",
        (
            "trinity.explorer.engine.scheduler",
            "trinity.explorer.engine.engine",
        ),
        "`Scheduler.update_from_output`: how it slices log-probabilities, and which outputs it returns. How "
        "`Request.block_hashes` grow from the last hash, or from the salt. `kv_cache_utils.py`: what a block's "
        "hash is made of. What a request's rank field carries on its way to the client: the number of loads stands "
        "there. `update_scheduler_stats` must be called with the statistics of a message also if `log_stats` is off.",
        (
            "services/explorer/tests/engine/test_scheduler_forgets.py",
            "services/explorer/tests/engine/test_deferred_outputs.py",
            "services/explorer/tests/engine/test_engine_on_real_vllm.py",
        ),
        (
            "vllm.config.scheduler:SchedulerConfig.scheduler_cls",
            "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
            "vllm.v1.core.sched.interface:PauseState.PAUSED_ALL",
            "vllm.v1.core.sched.interface:PauseState.UNPAUSED",
            "vllm.v1.core.sched.scheduler:Scheduler.requests",
            "vllm.v1.core.sched.scheduler:Scheduler.pause_state",
            "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state(pause_state)",
            "vllm.v1.core.sched.scheduler:Scheduler.add_request(request)",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output(scheduler_output, model_runner_output)",
            "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
            "vllm.v1.core.sched.scheduler:Scheduler.get_request_counts",
            "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.usage",
            "vllm.v1.metrics.stats:SchedulerStats.num_running_reqs",
            "vllm.v1.metrics.stats:SchedulerStats.num_waiting_reqs",
            "vllm.v1.metrics.stats:SchedulerStats.kv_cache_usage",
            "vllm.v1.engine.output_processor:OutputProcessor.update_scheduler_stats(scheduler_stats)",
            "vllm.v1.request:Request.request_id",
            "vllm.v1.request:Request.cache_salt",
            "vllm.v1.request:Request.block_hashes",
            "vllm.v1.request:Request.update_block_hashes",
            "vllm.v1.request:Request.num_computed_tokens",
            "vllm.v1.request:Request.sampling_params",
            "vllm.v1.request:Request.output_token_ids",
            "vllm.v1.request:Request.mm_features",
            "vllm.v1.request:Request.num_preemptions",
            "vllm.multimodal.inputs:MultiModalFeatureSpec.identifier",
            "vllm.sampling_params:SamplingParams.num_logprobs",
            "vllm.v1.outputs:ModelRunnerOutput.logprobs",
            "vllm.v1.outputs:ModelRunnerOutput.req_id_to_index",
            "vllm.v1.outputs:LogprobsLists.cu_num_generated_tokens",
            "vllm.v1.outputs:LogprobsLists.sampled_token_ranks",
            "vllm.v1.outputs:LogprobsLists.logprob_token_ids",
            "vllm.v1.outputs:LogprobsLists.slice_request(req_idx, num_positions)",
            "vllm.v1.engine:EngineCoreOutput.new_token_ids",
            "vllm.v1.engine:EngineCoreOutput.new_logprobs",
            "vllm.v1.engine:EngineCoreOutput.finish_reason",
            "vllm.v1.engine:EngineCoreOutputs.outputs",
            "vllm.v1.engine:EngineCoreOutputs.finished_requests",
            "vllm.v1.engine:EngineCoreOutputs.scheduler_stats",
            "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs(logprobs_lists)",
            "vllm.v1.engine.logprobs:LogprobsProcessor.tokenizer",
            "vllm.v1.engine.logprobs:LogprobsProcessor.cumulative_logprob",
            "vllm.logprobs:FlatLogprobs.start_indices",
            "vllm.logprobs:FlatLogprobs.end_indices",
            "vllm.logprobs:FlatLogprobs.ranks",
            "vllm.logprobs:FlatLogprobs.decoded_tokens",
        ),
    ),
    Border(
        "vLLM: the log-probability of the sampled token",
        ("trinity.explorer.engine.sampled_logprobs",),
        "Who calls `Sampler.gather_logprobs`, and who imports `compute_topk_scores`, whose arguments grow with "
        "versions. A vLLM without these places is only slower; benchmarks/gpu/logprobs.py shows the loss.",
        ("services/explorer/tests/engine/test_sampled_logprobs.py",),
        (
            "vllm.triton_utils:HAS_TRITON",
            "vllm.v1.outputs:LogprobsTensors",
            "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens"
            "(x, cu_num_tokens, num_tokens, replace_from, replace_to)",
            "vllm.v1.sample.sampler:Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)",
            "vllm.v1.worker.gpu.sample.sampler:compute_topk_scores"
            "(logits, num_logprobs, sampled_token_ids, cu_num_logits, max_per_req_token_ids, logits_mode)",
        ),
    ),
    Border(
        "vLLM: norms of a reproducible engine",
        ("trinity.explorer.engine.worker",),
        "Whether `RMSNorm.forward_cuda` still calls it by the name in its own module. Since vLLM's pull request 48391 "
        "its own kernel has one order of summation: when no older version is supported, ours can go.",
        ("services/explorer/tests/engine/test_loading_in_place.py",),
        (
            "vllm.envs:VLLM_BATCH_INVARIANT",
            "vllm.model_executor.layers.layernorm:rms_norm_batch_invariant(input, weight, eps, residual)",
        ),
    ),
    Border(
        "vLLM: on what an engine runs",
        ("trinity.explorer.engine.devices",),
        "What an explorer announces as its platform: runs with `reproducible` compare it.",
        ("services/explorer/tests/engine/test_engine_devices.py",),
        (
            "vllm.platforms:current_platform",
            "vllm.platforms.interface:Platform.get_device_name",
            "vllm:__version__",
        ),
    ),
    Border(
        "vLLM: the OpenAI-compatible endpoint",
        ("trinity.explorer.serving.endpoint",),
        "A further place of these functions goes into `_vllm`. What `init_app_state` asks of its engine "
        "client: the first engine answers everything but `generate` and `abort`.",
        ("tests/e2e/test_a_yaml_of_trinity_rft.py",),
        (
            "vllm.utils.argparse_utils:FlexibleArgumentParser",
            "vllm.entrypoints.launchers.app:build_app(args, supported_tasks, model_config) since 0.29",
            "vllm.entrypoints.launchers.api_server.app_state:init_app_state"
            "(engine_client, state, args, supported_tasks) since 0.29",
            "vllm.entrypoints.launchers.cli_args:make_arg_parser(parser) since 0.29 until 0.32",
            "vllm.entrypoints.common.cli_args:make_arg_parser(parser) since 0.33",
            "vllm.entrypoints.openai.api_server:build_app(args, supported_tasks, model_config) until 0.28",
            "vllm.entrypoints.openai.api_server:init_app_state(engine_client, state, args, supported_tasks) until 0.28",
            "vllm.entrypoints.openai.cli_args:make_arg_parser(parser) until 0.28",
        ),
    ),
    Border(
        "vLLM: agents' sessions",
        (
            "trinity.explorer.sessions.recording",
            "trinity.explorer.sessions.replies",
            "trinity.explorer.sessions.gateway",
        ),
        "Every protocol must still render its messages by `engine_client.renderer.render_chat_async`. Further fields "
        "of requests that change a prompt (`_REFUSED`) or a distribution (`_NEUTRAL`).",
        ("services/explorer/tests/sessions/test_gateway_on_real_vllm.py",),
        (
            "vllm.renderers.base:BaseRenderer.render_chat_async(conversations, chat_params, tok_params)",
            "vllm.renderers.base:BaseRenderer.render_cmpl_async(prompts, tok_params)",
            "vllm.renderers.base:BaseRenderer.render_messages_async(messages, params)",
            "vllm.renderers.base:BaseRenderer.get_tokenizer",
            "vllm.logprobs:FlatLogprobs.start_indices",
            "vllm.logprobs:FlatLogprobs.ranks",
        ),
    ),
)
