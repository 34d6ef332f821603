#!/bin/bash
# Types what Trinity-RFT's guides type, from an empty folder: bash tests/e2e/seeds_as_typed.sh [EMPTY FOLDER]
#
# Models and data are tiny and made on the spot; values behind a command only make a run short. Each answer is looked
# at: the exit code, and a text that must be in it. Ends with what is different by design, and 1 if an answer was
# unexpected. Needs `trinity` and its `python` on PATH; takes about five minutes on two cores.
repository=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder" && cd "$folder" || exit 1
[ -z "$(ls -A .)" ] || { echo "$folder is not empty"; exit 1; }
folder=$PWD wrong=0 typed=0
guide=$repository/satellites/trinity_rft/tests/trinity_rft
export PYTHONPATH=$repository/tests:$PYTHONPATH HOME=$folder/home CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1
unset ALFWORLD_DATA  # importing alfworld sets it, as in a process of tests; the guides leave it out
export WANDB_MODE=offline OMP_NUM_THREADS=1 COLUMNS=160

answer() {  # CODE TEXT COMMAND...: the command must end with the code, and say the text (a regular expression)
  local code=$1 text=$2 got; shift 2
  typed=$((typed + 1))
  echo "\$ $*"
  timeout 600 "$@" >answer.txt 2>&1; got=$?
  if [ $got -eq "$code" ] && grep -qE -- "$text" answer.txt; then
    echo "    exit $got: $(grep -m1 -E -- "$text" answer.txt | cut -c1-200)"
  else
    wrong=$((wrong + 1))
    echo "UNEXPECTED: exit $got, expected $code and /$text/"; tail -n 25 answer.txt
  fi
}
holds() {  # WHAT TEST...: the test must hold
  local what=$1; shift
  typed=$((typed + 1))
  if "$@" >answer.txt 2>&1; then echo "    $what"; else
    wrong=$((wrong + 1)); echo "UNEXPECTED: not so: $what"; tail -n 5 answer.txt; fi
}

# -- In place of the downloads: a model, data, and the examples that come with a checkout.
cp -r "$repository/examples" .
{ python examples/quickstart/make_model.py model && python examples/quickstart/make_data.py data --test-size 4 &&
  python -m e2e.guide_parts model "$HOME"; } >made.txt 2>&1 || { cat made.txt; exit 1; }
export TRINITY_MODEL_PATH=$folder/model TRINITY_TASKSET_PATH=$folder/data
short="buffer.batch_size=4 buffer.total_steps=2 model.max_model_len=256 model.max_response_tokens=16"

echo "== Every YAML of the guides"
for yaml in grpo_gsm8k grpo_gsm8k_early async_explorer async_explorer_new async_trainer ppo_example grpo_example; do
  cp "$guide/$yaml.yaml" .
  answer 0 "^  job folder|^  explorer" trinity check --config $yaml.yaml
done
cat "$guide/grpo_gsm8k.yaml" "$guide/stages_sft_then_rft.yaml" >stages.yaml
answer 0 "stage sft_warmup|sft_warmup" trinity check --config stages.yaml

echo "== Quick start"
job=checkpoints/Trinity-RFT-gsm8k/qwen2.5-1.5B-gsm8k
answer 0 "finished: 2 steps" trinity run --config examples/grpo_gsm8k/gsm8k.yaml $short trainer.save_interval=1
for file in buffer/experience_buffer.jsonl log/explorer.log monitor explorer_meta.json trainer_meta.json \
  latest_checkpointed_iteration.txt latest_state_dict_iteration.txt global_step_2/actor/huggingface/config.json \
  global_step_2/actor/huggingface/model.safetensors global_step_2/actor/huggingface/tokenizer.json; do
  holds "the job folder has $file" test -e $job/$file
done
answer 0 "global_step_1" trinity convert --checkpoint-dir $job
holds "global_step_1 has model.safetensors" test -f $job/global_step_1/actor/huggingface/model.safetensors
answer 0 "global_step_1.*(has|skip|already)" trinity convert --checkpoint-dir $job
rm $job/global_step_1/actor/huggingface/model.safetensors
answer 0 "global_step_1" trinity convert --checkpoint-dir $job/global_step_1
rm $job/global_step_1/actor/huggingface/model.safetensors
answer 0 "global_step_1" trinity convert --checkpoint-dir $job/global_step_1/actor
rm -r $job/global_step_1/actor/huggingface
answer 1 "base-model-dir" trinity convert --checkpoint-dir $job
answer 0 "global_step_1" trinity convert --checkpoint-dir $job --base-model-dir model
holds "the converted model loads in transformers" python -c "
from trinity.runtime.torch_builds import hide_unusable_companions as hide; hide()
from transformers import AutoModelForCausalLM as A; A.from_pretrained('$job/global_step_1/actor/huggingface')"

sed "s|/PATH/TO/YOUR/SFT/DATASET|$HOME/sft|" "$guide/stages_sft_then_rft.yaml" >>examples/grpo_gsm8k/gsm8k.yaml
answer 0 "rft is finished: 2 steps" trinity run --config examples/grpo_gsm8k/gsm8k.yaml $short name=staged \
  stages.0.buffer.train_batch_size=4 stages.0.buffer.total_steps=2

echo "== Asynchronous"
few="buffer.batch_size=4 buffer.train_batch_size=32 buffer.total_steps=12 model.max_model_len=256"
few="$few model.max_response_tokens=16 synchronizer.sync_interval=2"
bash examples/async_gsm8k/run.sh $few >async.txt 2>&1 & both=$!
for _ in $(seq 200); do [ -e checkpoints/Trinity-RFT-gsm8k/async_gsm8k/log/explorer.log ] && break; sleep 1; done
answer 0 "explorer_new" trinity run --config examples/async_gsm8k/explorer_new.yaml $few
holds "bash examples/async_gsm8k/run.sh $few: exit 0" wait $both
holds "it has trained 12 steps" grep -qE "finished: 12 steps" async.txt

echo "== R3L"
r3l="RAFT grpo opmd opmd_R3L opmd_reweight_adv"
for size in 1.5B 7B; do
  for name in $r3l; do
    answer 0 "explorer +[46] engine" trinity check --config examples/R3L/alfworld/${name}_$size.yaml
  done
done
answer 0 "checkpoints/ALFWORLD/ALFWORLD_RFT_Qwen_1.5B_GRPO_Baseline$" \
  trinity check --config examples/R3L/alfworld/grpo_1.5B.yaml
answer 0 "train.jsonl" bash -c "cd examples/R3L/alfworld && python get_alfworld_data.py"
python -c "import alfworld" 2>/dev/null ||
  answer 2 "alfworld is not installed" trinity check --deep --config examples/R3L/alfworld/grpo_1.5B.yaml \
    buffer.batch_size=1 model.max_model_len=4096
answer 0 "train.jsonl" bash -c "cd examples/R3L/countdown && python get_countdown_data.py --train 8 --test 2"
answer 0 "finished: 1 steps" trinity run --config examples/R3L/countdown/opmd_R3L_1.5B.yaml buffer.batch_size=2 \
  buffer.total_steps=1 model.max_model_len=1024 model.max_response_tokens=16 algorithm.repeat_times=2
job=checkpoints/COUNTDOWN/COUNTDOWN_RFT_Qwen_1.5B_OPMD_R3L
answer 0 "has trained all|finished" trinity run --config examples/R3L/countdown/opmd_R3L_1.5B.yaml buffer.batch_size=2 \
  buffer.total_steps=1 model.max_model_len=1024 model.max_response_tokens=16 algorithm.repeat_times=2
holds "rm -r $job" rm -r $job/

echo "== From veRL"
for name in ppo grpo; do
  answer 0 "." trinity import-verl "$guide/verl_${name}_example.sh" -o imported_$name.yaml
  holds "it is the guide's YAML, with veRL's own columns and greedy evaluations" python -c "
import yaml
imported, guide = (yaml.safe_load(open(p)) for p in ('imported_$name.yaml', '${name}_example.yaml'))
def others(value):
    if isinstance(value, list):
        return [*map(others, value)]
    own = ('response_key', 'reward_fn_key', 'data_selector')  # the last is veRL's shuffle
    if not isinstance(value, dict):
        return value
    return {k: others(v) for k, v in value.items() if k not in own and v != {'temperature': 0}}
greedy = [one['rollout_args'] == {'temperature': 0} for one in imported['buffer']['explorer_input']['eval_tasksets']]
assert others(imported) == others(guide) and 'reward_model.ground_truth' in str(imported), imported
assert greedy and all(greedy), imported"
done
verl="buffer.batch_size=4 buffer.total_steps=2 buffer.total_epochs=1 model.max_prompt_tokens=128 explorer.eval_interval=2"
verl="$verl model.max_response_tokens=16 trainer.max_token_len_per_gpu=4096"
answer 0 "finished: 2 steps" trinity run --config ppo_example.yaml $verl buffer.train_batch_size=4
holds "the classifier's output is the reward" python -c "
import json
seen = [json.loads(line) for line in open('checkpoints/verl_example/Qwen2-7B-Instruct_hybrid_rm/monitor/explorer.jsonl')]
found = [one for one in seen if 'rollout/reward_model/mean' in one]
assert found and all(one['rollout/reward_model/mean'] == one['rollout/reward/mean'] != 0 for one in found), seen"
answer 0 "finished: 2 steps" trinity run --config grpo_example.yaml $verl buffer.train_batch_size=32 \
  model.model_path=$folder/model

cat <<END
== Different by design
- Downloads (modelscope, huggingface-cli, alfworld-download) and pip install of vLLM, click and flash-attn are other
  programs' and are not typed here: the extras cpu and cuda of this package have the versions that fit.
- ray start, ray stop: there is no Ray; trinity run starts processes, and Ctrl-C ends them.
- rm <name>.db: there is no database; a run starts from the beginning when its job folder is removed.
- CUDA_VISIBLE_DEVICES before ray start: it stands before trinity run.
- trinity run of ALFWorld's YAMLs needs its package, its games and GPUs: trinity check reads each here, and CountDown's
  is run in their place.
- get_alfworld_data.py has no line to edit: --data-path names the games, by default those of alfworld-download.
- global_step_<n>/actor has DeepSpeed's parts and not FSDP's; explorer_output.db is written where the YAML names it.
- Logs are named by service (log/explorer.log, log/trainer.log), not by Ray actor.
- run.sh: trainer and explorers may start in any order.
END
echo "$typed answers, $wrong unexpected; in $folder"
[ $wrong -eq 0 ]
