"""Algorithms, losses, advantages, KL and entropy functions, strategies and selectors of a plugin folder.

The plugin is the example of docs/plugins.md. What it declares is known to `trinity check`, and refused in one sentence
where it cannot be right.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

RUN = """
project: p
name: n
model: {model_path: m, max_model_len: 64}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer: {batch_size: 8, total_steps: 2, explorer_input: {taskset: {name: t, path: d.jsonl}}}
"""
TRIED = """
import sys
import torch
from trinity import plugins
from trinity.trainer.algorithms.aggregation import Share, Totals
from trinity.trainer.algorithms.advantages import Rollouts, compute
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.loss import compute_loss
from trinity.buffer.window.policy import Candidate, policy_of
from trinity.config import load, make_plan
from trinity.config.schema.buffer import SelectorConfig
from trinity.data.selectors import make_selector

plugins.load([sys.argv[1]])
plan = make_plan(load(sys.argv[2], sys.argv[3:]))
lp, ref = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-1.5, -1.0]])
old, one = torch.tensor([[-1.1, -2.0]]), torch.ones(1, 2)
x = LossInputs(lp, 3 * one, one, old, 2 * one, ref)
loss, report = compute_loss(plan.algorithm, x, Totals(tokens=2, sequences=1))
ratio = (lp - old).detach().exp()
wanted = -2 * ratio * (-((ratio - 1) / 0.3) ** 2).exp() + 0.001 * 0.5 * (lp - ref).abs() - 0.1 * 2.0
assert torch.allclose(loss, wanted.mean()), (loss, wanted.mean())
assert "kl_loss" in report
masks = [torch.ones(1, dtype=torch.bool)] * 2
rollouts = Rollouts(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), masks, [torch.zeros(1)] * 2)
assert compute(plan.algorithm.advantage.name, plan.algorithm.advantage.args, rollouts).scores_N.tolist() == [-1.0, 1.0]
policy = policy_of(plan)
assert policy.kind == "arrival"
assert [policy.keeps(Candidate(steps, 4, tokens, 0.0)) for steps, tokens in ((4, 9), (5, 9), (0, 10**5))] == [1, 0, 0]
rows = make_selector(plan.tasksets[0].data_selector, [{} for _ in range(5)])
assert [rows.select(position) for position in range(4)] == [1, 3, 0, 2]
"""
LOADED = """
import sys
from pathlib import Path
from trinity.config.service import load_plan
path = Path(sys.argv[1])
path.write_text(path.read_text().replace("grpo,", "grpo, policy_loss_fn: soft_clip,"))
assert load_plan(path).algorithm.policy_loss.name == "soft_clip"
try:
    load_plan(path, needs_algorithm=True)
except ValueError as error:
    print(error)
assert load_plan(path, "", sys.argv[2], needs_algorithm=True).algorithm.policy_loss.args["width"] == 0.2
"""
MINE = [
    "algorithm.algorithm_type=mine",
    "algorithm.advantage_fn_args={slack: 1.0}",
    "algorithm.policy_loss_fn_args={width: 0.3}",
    "algorithm.entropy_loss_fn=bounded",
    "algorithm.entropy_loss_fn_args={entropy_coef: 0.1}",
    "algorithm.sample_strategy=young_and_short",
    "buffer.explorer_input.taskset.data_selector={selector_type: every_other, kwargs: {first: 1}}",
]


@pytest.fixture
def folder(tmp_path: Path, repository: Path) -> Path:
    """The Python blocks of the page's section, under the names in their first lines; and a YAML beside it."""
    text = (repository / "docs/plugins.md").read_text()
    section = text[text.index("## An algorithm") : text.index("## Auxiliary models")]
    place = tmp_path / "my_plugins"
    place.mkdir()
    for name, code in re.findall(r"```python\n# my_plugins/(\w+\.py)\n(.*?)```", section, flags=re.DOTALL):
        (place / name).write_text(code)
    (tmp_path / "run.yaml").write_text(RUN)
    return place


def check(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    given = {key: value for key, value in os.environ.items() if key != "TRINITY_PLUGIN_DIRS"}
    command = [sys.executable, "-m", "trinity.cli.main", "check", str(folder.parent / "run.yaml"), *overrides]
    command += ["--plugin-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=given)


def test_every_kind_of_the_page_computes_what_it_says(folder: Path) -> None:
    command = [sys.executable, "-c", TRIED, str(folder), str(folder.parent / "run.yaml"), *MINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_check_knows_names_and_arguments_of_all_kinds(folder: Path) -> None:
    done = check(folder, *MINE)
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout


def test_what_is_misspelt_or_out_of_bounds_is_refused_with_the_nearest_name(folder: Path) -> None:
    done = check(
        folder,
        "algorithm.policy_loss_fn=soft_clip",
        "algorithm.policy_loss_fn_args={widht: 0.3}",
        "algorithm.advantage_fn=best_off",
        "algorithm.kl_loss_fn=half_ab",
        "algorithm.sample_strategy=young_and_shrt",
        "buffer.explorer_input.taskset.data_selector={selector_type: every_othr}",
    )
    assert done.returncode == 2
    assert "algorithm.policy_loss_fn_args.widht: soft_clip has no such argument; did you mean 'width'?" in done.stderr
    for near in ("best_of", "half_abs", "young_and_short", "every_other"):
        assert f"which is not registered; did you mean '{near}'" in done.stderr
    assert "Traceback" not in done.stderr
    done = check(folder, "algorithm.policy_loss_fn=soft_clip", "algorithm.policy_loss_fn_args={width: 0}")
    assert "algorithm.policy_loss_fn_args.width: is 0, must be above 0" in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("@policy_loss('ppo')\ndef f(x, share): ...", "'ppo' is the name of a built-in policy loss; choose another"),
        ("@advantage('grpo_verl')\ndef f(rollouts): ...", "'grpo_verl' is the name of a built-in advantage function"),
        (
            "@selector('shuffle')\nclass S: ...",
            "the selector 'shuffle' has to take (rows, seed, features, *, arguments",
        ),
        ("algorithm('sft', policy_loss='sft')", "'sft' is the name of a built-in algorithm; choose another"),
        (
            "@policy_loss('soft_clip')\ndef f(x, share): ...",
            "'soft_clip' is a policy loss of algorithms already; choose another name",
        ),
        ("@policy_loss('f')\ndef f(x): ...", "the policy loss 'f' has to take (x, share, *, arguments with defaults)"),
        ("@policy_loss('f')\ndef f(x, share, *, a): ...", "argument 'a' of f has no default; give it one"),
        ("@policy_loss('f')\ndef f(x, share, *, a: Fraction = 2.0): ...", "the default of 'a' of f is 2.0, must be in"),
        ("@policy_loss('f', traits=['ratios'])\ndef f(x, share): ...", "'f' has the unknown trait 'ratios'; known: ra"),
        ("algorithm('a', policy_los='ppo')", "algorithm 'a' has no 'policy_los'; known: advantage, "),
        ("algorithm('a', advantage='grpo')", "algorithm 'a' has no policy_loss; give its name"),
        ("import no_such_module_x", "ModuleNotFoundError: No module named 'no_such_module_x'"),
    ],
)
def test_a_plugin_that_cannot_be_right_is_refused_with_file_and_reason(folder: Path, code: str, said: str) -> None:
    (folder / "worse.py").write_text(f"from trinity.plugins import *\n\n{code}\n")
    done = check(folder)
    assert done.returncode == 2
    assert re.search(re.escape(f"trinity: {folder / 'worse.py'}:") + r"\d+: " + re.escape(said), done.stderr)
    assert "Traceback" not in done.stderr


def test_a_service_that_needs_the_algorithm_refuses_an_unknown_name_and_others_take_it(folder: Path) -> None:
    command = [sys.executable, "-c", LOADED, str(folder.parent / "run.yaml"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "algorithm.policy_loss_fn: is 'soft_clip', which is not registered" in done.stdout
