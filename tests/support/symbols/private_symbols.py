"""Every name of vLLM and DeepSpeed that the product uses, and what it uses of the internals of other libraries.

One `Border` for each purpose: where the names are used, what to look at when one of them moves, and the names. A name
is "module:attribute.path", with the parameters that are passed in brackets, and with the versions that have it where
not all supported ones do. "module:*.name" is set on objects of any class in that module.

tests/contract/test_private_symbols.py holds the installed versions and the sources of the product against this list.
docs/development/when_vllm_moves.md says how to use it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Border:
    """`used_in` are modules of the product; `tests` are files that fail when the behaviour behind a name changes."""

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
            "vllm.v1.engine.output_processor:LogprobsProcessor",
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
        ("trinity.explorer.engine.worker", "trinity.explorer.engine.replay"),
        "The order of calls in `Worker.update_weights`, and who resets the target and the flag of an update that "
        "failed. `layerwise.py`: which layers a reload passes over (a head tied to the embeddings, on CPUs), and "
        "what it counts while weights arrive. New kinds of `quant_method`, and new layers that derive one weight "
        "from another as `MLA` does: they must not be loaded in place. The canary refuses a version that was "
        "loaded wrongly.",
        (
            "services/explorer/tests/engine/test_loading_in_place.py",
            "services/explorer/tests/engine/test_loading_by_replay.py",
            "tests/integration/test_weights_on_real_vllm.py",
            "tests/integration/test_trainer_and_engine_agree.py",
        ),
        (
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
        "A third place of these functions goes into `_vllm` beside the two. What `init_app_state` asks of its engine "
        "client: the first engine answers everything but `generate` and `abort`.",
        ("tests/e2e/test_a_yaml_of_trinity_rft.py",),
        (
            "vllm.utils.argparse_utils:FlexibleArgumentParser",
            "vllm.entrypoints.launchers.app:build_app(args, supported_tasks, model_config) since 0.29",
            "vllm.entrypoints.launchers.api_server.app_state:init_app_state"
            "(engine_client, state, args, supported_tasks) since 0.29",
            "vllm.entrypoints.launchers.cli_args:make_arg_parser(parser) since 0.29",
            "vllm.entrypoints.openai.api_server:build_app(args, supported_tasks, model_config) until 0.28",
            "vllm.entrypoints.openai.api_server:init_app_state(engine_client, state, args, supported_tasks) until 0.28",
            "vllm.entrypoints.openai.cli_args:make_arg_parser(parser) until 0.28",
        ),
    ),
    Border(
        "vLLM: agents' sessions",
        ("trinity.explorer.serving.recording", "trinity.explorer.serving.replies", "trinity.explorer.serving.gateway"),
        "Every protocol must still render its messages by `engine_client.renderer.render_chat_async`. Further fields "
        "of requests that change a prompt (`_REFUSED`) or a distribution (`_NEUTRAL`).",
        ("services/explorer/tests/serving/test_gateway_on_real_vllm.py",),
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

DEEPSPEED = (
    Border(
        "DeepSpeed: the engine",
        ("trinity.trainer.engine.deepspeed", "trinity.trainer.engine.engine"),
        "What `DeepSpeedEngine.backward` divides the loss by. Which ZeRO stage and dtype takes which optimizer "
        "(`_configure_optimizer`). The counters of a backward pass, which `abandon` resets after memory ran out.",
        (
            "services/trainer/tests/engine/test_deepspeed_settings.py",
            "services/trainer/tests/engine/test_memory_runs_out.py",
        ),
        (
            "deepspeed:initialize(model, optimizer, config)",
            "deepspeed:init_distributed(dist_backend, verbose, timeout, init_method, rank, world_size)",
            "deepspeed.utils:logger",
            "deepspeed.ops:__compatible_ops__",
            "deepspeed.ops.adam:DeepSpeedCPUAdam",
            "deepspeed.runtime.engine:DeepSpeedEngine.backward(loss, scale_wrt_gas)",
            "deepspeed.runtime.engine:DeepSpeedEngine.step",
            "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint"
            "(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)",
            "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint(load_dir, tag, load_module_strict)",
            "deepspeed.runtime.config:DeepSpeedConfig.managed_gradient_accumulation",
            "deepspeed.runtime.base_optimizer:ZeROOptimizer._backward_active_depth",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.empty_partition_cache",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.refresh_fp32_params",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.refresh_fp32_params",
            "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.refresh_fp32_params",
        ),
    ),
    Border(
        "DeepSpeed: the norm of a gradient",
        ("trinity.trainer.engine.deepspeed",),
        "Where each optimizer computes its norm before it clips, and calls the `step` of the one that it wraps: "
        "the guard there stops updates whose norm is not finite.",
        ("services/trainer/tests/engine/test_updates.py", "tests/e2e/test_bad_steps.py"),
        (
            "deepspeed.runtime.engine:DeepSpeedEngine._global_grad_norm",
            "deepspeed.runtime.engine:DeepSpeedEngine.gradient_clipping",
            "deepspeed.runtime.engine:DeepSpeedEngine.clip_fp32_gradients",
            "deepspeed.runtime.engine:DeepSpeedEngine.mpu",
            "deepspeed.runtime.utils:clip_grad_norm_(parameters, max_norm, mpu)",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._global_grad_norm",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._global_grad_norm",
            "deepspeed.runtime.bf16_optimizer:BF16_Optimizer._global_grad_norm",
        ),
    ),
    Border(
        "DeepSpeed: parameters under ZeRO 3",
        ("trinity.trainer.engine.weights", "trinity.trainer.engine.deepspeed"),
        "`partition_parameters.py`: how a parameter is laid flat, padded and cut (`_partition_param`), and the "
        "attributes it gets. If the cut changes, gathered weights are wrong, and the canary of the next version "
        "says so.",
        ("services/trainer/tests/engine/test_gathered_weights.py",),
        (
            "deepspeed:zero",
            "deepspeed.runtime.zero:GatheredParameters",
            "deepspeed.runtime.zero.partition_parameters:GatheredParameters.__init__(params, modifier_rank)",
            "deepspeed.runtime.zero.partition_parameters:*.ds_tensor",
            "deepspeed.runtime.zero.partition_parameters:*.ds_shape",
            "deepspeed.runtime.zero.partition_parameters:*.ds_numel",
            "deepspeed.runtime.zero.partition_parameters:*.ds_status",
            "deepspeed.runtime.zero.partition_parameters:*.ds_process_group",
            "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.AVAILABLE",
        ),
    ),
    Border(
        "DeepSpeed: sequence parallelism",
        ("trinity.trainer.model.sequence_parallel",),
        "`single_all_to_all`: which dimension is scattered and which is gathered, and its gradient.",
        ("services/trainer/tests/engine/test_splitting_changes_nothing.py",),
        (
            "deepspeed.sequence.layer:_SeqAllToAll",
            "deepspeed.sequence.layer:_SeqAllToAll.forward(group, input, scatter_idx, gather_idx, batch_dim_idx)",
        ),
    ),
    Border(
        "DeepSpeed: classes in its checkpoints",
        ("trinity.cli.convert.safe_load", "trinity.cli.convert.deepspeed"),
        "A checkpoint names classes; `trinity convert` reads it with stand-ins and refuses every other name. If a "
        "class moves, new checkpoints name the new place: add it and keep the old one. `zero_to_fp32.py` has the "
        "layout of shards. The names of torch's DTensor in checkpoints of FSDP are in the same file.",
        ("cli/tests/convert/test_convert.py",),
        (
            "deepspeed.runtime.zero.config:ZeroStageEnum",
            "deepspeed.runtime.fp16.loss_scaler:LossScaler",
            "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
            "deepspeed.utils.tensor_fragment:fragment_address",
        ),
    ),
)

OTHERS = (
    Border(
        "torch: copies and loads that are watched",
        ("trinity.explorer.engine.replay", "trinity.trainer.engine.weights"),
        "`_foreach_copy_` takes lists of equal length. A dispatch mode watches a load; where it meets a new operator "
        "vLLM's own, slower way loads the model.",
        (
            "services/explorer/tests/engine/test_loading_by_replay.py",
            "services/trainer/tests/engine/test_gathered_weights.py",
        ),
        (
            "torch:_foreach_copy_",
            "torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__(func, types, args, kwargs)",
            "torch.utils._pytree:tree_leaves(tree)",
        ),
    ),
    Border(
        "torch: groups that may break",
        ("trinity.weights.collective", "trinity.weights.group_store", "trinity.weights.nccl"),
        "`ProcessGroupNCCL.cpp`: which threads watch a group, and which environment variables end the process. The "
        "timeout of NCCL's options has no public setter. The store is a class of Python: what the groups ask of it.",
        ("tests/integration/test_collective_group.py",),
        (
            "torch._C._distributed_c10d:ProcessGroupGloo.__init__(store, rank, size, timeout)",
            "torch._C._distributed_c10d:ProcessGroupNCCL.Options",
            "torch._C._distributed_c10d:Backend.Options._timeout",
            "torch._C._distributed_c10d:BroadcastOptions.rootRank",
        ),
    ),
    Border(
        "torch: kernels and dropout",
        ("trinity.trainer.model.kernels", "trinity.trainer.model.policy", "trinity.trainer.model.varlen"),
        "`recompile_limit` is global before torch 2.12 and an argument of `torch.compile` from there on. "
        "`varlen_attn` gets `enable_gqa` where its signature has it. Every dropout of torch derives from "
        "`_DropoutNd`.",
        ("services/trainer/tests/model/test_varlen.py", "services/trainer/tests/model/test_dropout.py"),
        (
            "torch._dynamo:maybe_mark_dynamic",
            "torch._dynamo.config:recompile_limit",
            "torch.nn.modules.dropout:_DropoutNd",
            "torch.nn.attention.varlen:varlen_attn"
            "(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)",
        ),
    ),
    Border(
        "transformers: layers that are replaced",
        ("trinity.trainer.model.attention", "trinity.trainer.model.fused", "trinity.trainer.model.checkpointing"),
        "What a model passes to its attention function, and which models may have it replaced. `fused.py` leaves "
        "alone each layer that differs from its own formula; the log says how many it replaced.",
        (
            "services/trainer/tests/model/test_packing.py",
            "services/trainer/tests/model/test_fused_layers.py",
        ),
        (
            "transformers.modeling_utils:PreTrainedModel._supports_attention_backend",
            "transformers.modeling_utils:PreTrainedModel._is_stateful",
            "transformers.modeling_utils:PreTrainedModel.set_attn_implementation(attn_implementation)",
            "transformers.modeling_utils:AttentionInterface",
            "transformers.modeling_layers:GradientCheckpointingLayer",
            "transformers.models.qwen2.modeling_qwen2:apply_rotary_pos_emb(q, k, cos, sin)",
            "transformers.models.qwen2.modeling_qwen2:Qwen2RMSNorm.variance_epsilon",
            "transformers.models.qwen2.modeling_qwen2:Qwen2MLP.gate_proj",
        ),
    ),
    Border(
        "peft: adapters",
        ("trinity.trainer.model.lora",),
        "The names of adapter parameters (`<module>.lora_A.default.weight`), from which those in peft's files "
        "follow, and whether a scale of 0 is applied in every kind of layer.",
        ("services/trainer/tests/model/test_lora.py", "tests/e2e/test_lora.py"),
        (
            "peft:inject_adapter_in_model(peft_config, model, adapter_name)",
            "peft.tuners.lora.layer:LoraLayer.set_scale(adapter, scale)",
        ),
    ),
    Border(
        "Others: one private name each",
        (
            "trinity.runtime.broker.connection",
            "trinity.data.task_pipeline.data_juicer",
        ),
        "nats-py keeps what the server said at the connection (`cluster` says whether streams get replicas). "
        "data-juicer installs packages by itself, which is refused.",
        ("tests/integration/buffer/test_log_and_ledger.py",),
        (
            "nats.aio.client:Client._server_info",
            "data_juicer.utils.lazy_loader:LazyLoader._install_package",
        ),
    ),
)

BORDERS = (*VLLM, *DEEPSPEED, *OTHERS)
