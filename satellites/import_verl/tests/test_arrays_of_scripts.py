"""Arrays, functions, subshells and here-documents of scripts: the certain stays, the uncertain is named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checks.verl_scripts import Importer

pytestmark = pytest.mark.core

OPTIONS = """algorithm.adv_estimator=rloo
data.train_files=/rows/train.parquet
data.val_files=/rows/test.parquet   # the small one
data.train_batch_size=96
actor_rollout_ref.model.path="/models/of mine"
actor_rollout_ref.actor.ppo_mini_batch_size=96
actor_rollout_ref.rollout.n=3
trainer.total_epochs=2"""
ARRAY = f"PARTS=(\n{OPTIONS}\n)\n"
RUN = "python3 -m verl.trainer.main_ppo"
USE = f'{RUN} "${{PARTS[@]}}"\n'
GAINS = "what PARTS gains"


@pytest.fixture
def read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Importer:
    return Importer(tmp_path, capsys)


def certain(text: str) -> dict[str, Any]:
    found = yaml.safe_load(text)
    assert found["model"]["model_path"] == "/models/of mine"
    assert found["buffer"]["batch_size"] == 96
    assert found["algorithm"] == {"algorithm_type": "rloo", "repeat_times": 3} | {
        key: value for key, value in found["algorithm"].items() if key not in ("algorithm_type", "repeat_times")
    }
    assert found["buffer"]["total_epochs"] == 2
    return found


@pytest.mark.parametrize(
    "inside",
    [
        'if [ -n "$FAST" ]; then\n  PARTS+=( trainer.test_freq=7 )\nfi\n',
        "if [[ $A == b ]]; then PARTS+=(trainer.test_freq=7); else PARTS+=(trainer.test_freq=8); fi\n",
        'case "$1" in\n  small) PARTS+=(trainer.test_freq=7) ;;\n  (*) ;;\nesac\n',
        "for each in 7; do PARTS+=(trainer.test_freq=7); done\n",
        "while read -r line; do PARTS+=(trainer.test_freq=7); done < rows\n",
        "until false; do PARTS+=(trainer.test_freq=7); done\n",
        '[ "${D:-0}" = 1 ] && PARTS+=(trainer.test_freq=7)\n',
        "more() { PARTS+=(trainer.test_freq=7); }\nif [ -f x ]; then more; fi\n",
        'if [ -f x ]; then PARTS=("${PARTS[@]}" trainer.test_freq=7); fi\n',
        "if [ -f x ]; then PARTS[8]=trainer.test_freq=7; fi\n",
        "PARTS[$WHERE]=trainer.test_freq=7\n",
    ],
)
def test_what_only_a_condition_adds_is_named(read: Importer, inside: str) -> None:
    result = read(ARRAY + inside + USE)
    assert result.code == 0
    found = certain(result.out)
    assert found["explorer"]["eval_interval"] != 7
    assert any(GAINS in line and "trainer.test_freq=7" in line for line in result.err.splitlines()), result.err


@pytest.mark.parametrize(
    "script",
    [
        ARRAY + "PARTS+=(trainer.test_freq=7)\n" + USE,
        ARRAY + 'more() { PARTS+=("$@"); }\nmore trainer.test_freq=7\n' + USE,
        ARRAY + f'{RUN} "${{PARTS[@]}}" trainer.test_freq=7 "${{PARTS[@]}}"\n',
        ARRAY + f'go() {{\n  local n="$1"; shift\n  {RUN} "${{PARTS[@]}}" "$@" trainer.test_freq="$n"\n}}\n'
        'outer() { go 7 "$@"; }\nouter trainer.save_freq=5\n',
        ARRAY + "cat > x <<EOF\nalgorithm.adv_estimator=gae\nPARTS=()\nEOF\nPARTS+=(trainer.test_freq=7)\n" + USE,
        ARRAY + "cat <<-'END'\n\tPARTS=(a)\n\tEND\nPARTS+=(trainer.test_freq=7)\n" + USE,
        ARRAY + "PARTS[8]=trainer.test_freq=7\n" + USE,
        ARRAY + "PARTS+=(trainer.test_freq=6)\nPARTS[-1]=trainer.test_freq=7\n" + USE,
        ARRAY + "PARTS+=(trainer.test_freq=7 trainer.test_freq=6)\nunset 'PARTS[9]'\n" + USE,
        ARRAY + "add() { local -n to=$1; shift; to+=(\"$@\"); }\nadd PARTS trainer.test_freq=7\n" + USE,
        ARRAY + "PARTS+=(trainer.test_freq=7)\n( PARTS+=(trainer.test_freq=6); cd /x )\n" + USE,
        ARRAY + 'set -- "${PARTS[@]}" trainer.test_freq=7\n' + f'{RUN} "$@"\n',
        ARRAY + f"(cd /verl && {RUN} trainer.test_freq=7 \"${{PARTS[@]}}\")\n",
        (ARRAY + "PARTS+=(trainer.test_freq=7)\n" + USE).replace("\n", "\r\n"),
    ],
)  # fmt: skip
def test_what_is_certain_is_read(read: Importer, script: str) -> None:
    result = read(script)
    assert result.code == 0, result.err
    assert certain(result.out)["explorer"]["eval_interval"] == 7
    assert "only a running shell" not in result.err


@pytest.mark.parametrize("call", ['CMD="{}"\neval "$CMD"\n', 'CMD="{}"\n$CMD\n', "srun -N1 bash -c '{}'\n"])
def test_a_call_in_a_text_is_read(read: Importer, call: str) -> None:
    options = OPTIONS.replace("   # the small one", "").replace('"/models/of mine"', "/models/mine").splitlines()
    result = read(call.format(" ".join([RUN, *options])))
    assert result.code == 0, result.err
    assert yaml.safe_load(result.out)["model"]["model_path"] == "/models/mine"


@pytest.mark.parametrize(
    "script",
    [
        f'{RUN} "$@"\n',
        'if [ -n "$X" ]; then\n' + ARRAY + "fi\n" + USE,
        "mapfile -t PARTS <<EOF\nalgorithm.adv_estimator=rloo\nEOF\n" + USE,
        ARRAY + "readarray -t PARTS < options.txt\n" + USE,
        ARRAY + "unset PARTS\n" + USE,
        "source ./common.sh\n" + USE,
        f'go() {{ {RUN} "$@"; }}\ngo\n',
        f"{RUN}\n",
        'X=\'eval "$X" a verl.trainer.main_ppo\'\neval "$X"\n',
    ],
)
def test_no_option_at_all_is_a_failure(read: Importer, script: str) -> None:
    result = read(script)
    assert result.code in (1, 2) and not result.out, result.err


IN_LINE = OPTIONS.replace("   # the small one", "").replace('"', "").replace(" mine", "_mine").split("\n")


@pytest.mark.parametrize("command", [RUN, f"eval {RUN}", f"nohup {RUN}"])
def test_options_in_a_text_are_words(read: Importer, command: str) -> None:
    before, after = " ".join(IN_LINE[:5]), " ".join(IN_LINE[5:])
    gains = 'if [ -n "$FAST" ]; then OPTS="$OPTS trainer.test_freq=7"; else OPTS+=" trainer.test_freq=9"; fi\n'
    result = read(f'OPTS="{before}"\n{gains}OPTS+=" {after}"\n{command} $OPTS $MORE\n')
    found = yaml.safe_load(result.out)
    assert (found["model"]["model_path"], found["algorithm"]["algorithm_type"]) == ("/models/of_mine", "rloo")
    assert (found["buffer"]["batch_size"], found["algorithm"]["repeat_times"]) == (96, 3)
    assert result.err.count("what OPTS gains") == 2 and "not mapped: $MORE: only" in result.err


def test_parts_of_arrays_and_arguments_are_read(read: Importer) -> None:
    array = "PARTS=(\nfirst\n" + OPTIONS + "\nlast\n)\n"
    run = f'run() {{ {RUN} "${{PARTS[@]:1:8}}" "${{@:3}}" ${{1:+trainer.project_name=$1}} ${{2:+a.b=1}}; }}\n'
    result = read(f'{array}{run}run sums "" trainer.nnodes=2 $MORE\n')
    found = certain(result.out)
    assert (found["project"], found["cluster"]["node_num"]) == ("sums", 2)
    assert "$MORE: only" in result.err and "\x00" not in result.out + result.err


def test_the_default_of_an_option_that_is_not_known_is_no_fact(read: Importer) -> None:
    result = read(
        'case "$KIND" in\n  a) HOW=grpo ;;\n  *) HOW=rloo ;;\nesac\n'
        f"{RUN} algorithm.adv_estimator=$HOW {' '.join(IN_LINE[1:])}\n"
    )
    assert "algorithm.adv_estimator: line 5 uses $HOW" in result.err
    assert "algorithm_type: ppo  # algorithm.adv_estimator is NOT MAPPED (see above): veRL's default gae" in result.out


def test_a_file_that_the_script_reads_is_named(read: Importer) -> None:
    result = read(f"source conf/common.sh\n. .venv/bin/activate\n{ARRAY}{USE}")
    certain(result.out)
    assert "line 1: conf/common.sh is not read; what it sets is taken from the environment" in result.err
    assert "activate" not in result.err
