"""Every name of vLLM and DeepSpeed that the product uses, and the internals of other libraries that it uses.

One `Border` for each purpose (vLLM's in vllm_symbols.py): modules that use the names, things to check when one of
them moves, and the names. A name is "module:attribute.path", with the parameters that are passed in brackets, and with
the versions that have it where not all supported ones do. "module:*.name" is set on objects of any class in that
module.

tests/contract/test_private_symbols.py holds the installed versions and the sources of the product against this list.
docs/development/when_vllm_moves.md says how to use it.
"""

from contract.symbols.vllm_symbols import VLLM, Border

DEEPSPEED = (
    Border(
        "DeepSpeed: the engine",
        ("trinity.trainer.engine.deepspeed", "trinity.trainer.engine.engine", "trinity.trainer.engine.optimizers"),
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
        "DeepSpeed: gradients and the step of ZeRO 2",
        ("trinity.trainer.engine.gradients",),
        "Which methods a gradient passes from autograd to `step` of `stage_1_and_2.py`: four are replaced on one rank.",
        ("services/trainer/tests/engine/test_updates_of_one_rank.py",),
        (
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.process_gradients(param, i)",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.overlapping_partition_gradients_reduce_epilogue",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.finalize_gradient_accumulation_boundary",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step(closure)",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._global_grad_norm",
            "deepspeed.runtime.zero.stage_1_and_2:*.bit16_groups",
            "deepspeed.runtime.zero.stage_1_and_2:*.bit16_groups_flat",
        ),
    ),
    Border(
        "DeepSpeed: the norm of a gradient",
        ("trinity.trainer.engine.deepspeed", "trinity.trainer.engine.gradients"),
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
        "DeepSpeed: where masters and weights lie",
        ("trinity.trainer.engine.slices",),
        "How each ZeRO stage lays parameters flat, pads and cuts them, and how weights follow from masters after an "
        "update. If a place changes, resumed weights are wrong: the test compares them with DeepSpeed's own functions.",
        ("services/trainer/tests/engine/test_checkpoints_of_any_shape.py",),
        (
            "deepspeed.runtime.zero.stage_1_and_2:*.bit16_groups",
            "deepspeed.runtime.zero.stage_1_and_2:*.bit16_groups_flat",
            "deepspeed.runtime.zero.stage_1_and_2:*.single_partition_of_fp32_groups",
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params",
            "deepspeed.runtime.zero.stage3:*.fp16_groups",
            "deepspeed.runtime.zero.stage3:*.fp16_partitioned_groups_flat",
            "deepspeed.runtime.zero.stage3:*.fp32_partitioned_groups_flat",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.checkpoint_event_prologue",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue",
            "deepspeed.runtime.zero.partition_parameters:*.partition_numel",
            "deepspeed.runtime.zero.partition_parameters:*.ds_numel",
            "deepspeed.runtime.zero.partition_parameters:*.ds_shape",
            "deepspeed.runtime.fp16.unfused_optimizer:*.fp16_groups",
            "deepspeed.runtime.fp16.unfused_optimizer:*.fp32_groups",
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
        ("trinity.convert.safe_load", "trinity.convert.deepspeed"),
        "A checkpoint names classes; `trinity convert` reads it with stand-ins and refuses every other name. If a "
        "class moves, new checkpoints name the new place: add it and keep the old one. `zero_to_fp32.py` has the "
        "layout of shards. The names of torch's DTensor in checkpoints of FSDP are in the same file.",
        ("satellites/convert/tests/test_convert.py",),
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
        ("trinity.weights.collective", "trinity.weights.group_store"),
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
        "torch: attention with its log-sum-exp",
        ("trinity.trainer.model.shared_attention",),
        "`torch.nn.attention.varlen`: these calls, their order of arguments, and log-sum-exps of [heads, tokens].",
        ("services/trainer/tests/model/test_shared_prefixes.py",),
        (
            "torch.ops.aten:_flash_attention_forward",
            "torch.ops.aten:_flash_attention_backward",
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
            "transformers.models.qwen2.modeling_qwen2:apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)",
            "transformers.models.qwen2.modeling_qwen2:Qwen2RMSNorm.variance_epsilon",
            "transformers.models.qwen2.modeling_qwen2:Qwen2MLP.gate_proj",
        ),
    ),
    Border(
        "transformers: routers of experts",
        ("trinity.trainer.model.routers",),
        "Which modules give a model's `router_logits`, and at which place of their outputs.",
        ("services/trainer/tests/model/test_routers.py",),
        ("transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoePreTrainedModel._can_record_outputs",),
    ),
    Border(
        "transformers: names of dequantized weights",
        ("trinity.trainer.model.policy",),
        "Whether `revert_weight_conversion` still gives experts the pattern of the quantizer as their name.",
        ("tests/models/test_quantized_weights_are_trained_as_bfloat16.py",),
        ("transformers.core_model_loading:*._weight_conversions",),
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
        "peft and transformers: adapters of experts",
        ("trinity.trainer.model.expert_adapters",),
        "How peft names and lays out A and B of a layer's experts (`ParamWrapper`), and nests both parameters. What "
        " transformers' experts compute between and after their products, biases and gates.",
        ("tests/models/test_adapters_of_experts.py",),
        (
            "peft.tuners.lora.layer:ParamWrapper",
            "transformers.integrations.moe:*._apply_gate",
            "transformers.integrations.moe:*.is_transposed",
            "transformers.integrations.moe:*.has_bias",
        ),
    ),
    Border(
        "Others: one private name each",
        (
            "trinity.runtime.broker.connection",
            "trinity.task_pipeline.data_juicer",
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
