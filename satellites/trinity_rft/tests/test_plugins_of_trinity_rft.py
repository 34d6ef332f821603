"""Files written for Trinity-RFT: imported without torch, known to `trinity check`, refused with line and page."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity import plugins
from trinity.common.rewards import REWARD_FUNCTIONS, MathBoxedRewardFn, RewardFn
from trinity.common.rewards.built_in import SCORE
from trinity.common.rewards.reward_fn import arguments_of

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[3]
FILES = ROOT / "tests/support/fakes/trinity_rft"
CODE = """
import sys
from trinity import plugins
try:
    plugins.load(sys.argv[1:])
except plugins.PluginError as error:
    print(error)
else:
    print(*sorted([*plugins.WORKFLOWS, *plugins.REWARD_FUNCTIONS]), "torch" in sys.modules)
"""
LOSS = "@POLICY_LOSS_FN.register_module('l')\nclass L(PolicyLossFn):\n    def __call__"
TYPE = "@ALGORITHM_TYPE.register_module('t')\nclass T(AlgorithmType):\n    @classmethod\n"
TYPE += "    def default_config(cls): return {"


def loaded(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", CODE, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_files_are_imported_without_torch(tmp_path: Path) -> None:
    for path in (FILES / "workflows").glob("*.py"):
        if "import torch" not in (text := path.read_text()):
            (tmp_path / path.name).write_text(text)
    assert loaded(tmp_path) == "best_of_two hinted_sums history_agent last_number second_look False"


def test_operators_are_imported_where_no_buffer_is_installed(tmp_path: Path) -> None:
    (tmp_path / "own_operator.py").write_text((FILES / "operators/own_operator.py").read_text())
    code = (
        "import importlib.util, sys\nfrom trinity import plugins\n"
        "assert importlib.util.find_spec('trinity.buffer') is None\n"
        "plugins.load(sys.argv[1:])\nassert 'near_the_best' in plugins.EXPERIENCE_OPERATORS\n"
        "from trinity.common.operators import EXPERIENCE_OPERATORS\nimport trinity.buffer.operators as found\n"
        "assert found.EXPERIENCE_OPERATORS is EXPERIENCE_OPERATORS\n"
        "from trinity.buffer.operators.experience_operator import ExperienceOperator\n"
    )
    # Folders in PYTHONPATH are read without their .pth files, and so without the other parts.
    parts = [ROOT / part for part in ("lib/config/src", "lib/runtime/src", "proto", "satellites/trinity_rft/src")]
    folders = [*parts, *(path for path in sys.path if "site-packages" in path)]
    command = [sys.executable, "-S", "-c", code, str(tmp_path)]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from trinity.buffer.operators import Experience0", "cannot import name 'Experience0'"),
        ("from trinity.common.workflows import AgentScopeWorkflow", "cannot import name 'AgentScopeWorkflow'"),
        ("from trinity.common.verl_config import veRLConfig", "No module named 'trinity.common.verl_config'"),
    ],
)
def test_what_is_not_there_is_refused_with_line_and_page(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "of_another.py").write_text(f"import json\n\n{text}\n")
    message = loaded(tmp_path)
    assert message.startswith(f"{tmp_path / 'of_another.py'}:3: ") and said in message
    assert message.endswith("docs/from_trinity.md has the names of Trinity-RFT that can be imported")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@WORKFLOWS.register_module('math_workflow')\nclass W(Workflow):\n    def run(self): ...", "is built in"),
        ("@REWARD_FUNCTIONS.register_module('r')\nclass R: ...", "derive it from trinity.common.rewards.RewardFn"),
        ("REWARD_FUNCTIONS.register_module('math_reward', module_cls=RewardFn, force=True)", "is built in"),
        ("@WORKFLOWS.register_module('w')\nclass W(Workflow):\n    is_async = True", "defines no run_async()"),
    ],
)
def test_what_cannot_be_registered_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    head = "from trinity.common.rewards import *\nfrom trinity.common.workflows import *\n"
    (tmp_path / "registering.py").write_text(f"{head}{text}\n")
    message = loaded(tmp_path)
    assert message.startswith(f"{tmp_path / 'registering.py'}:3: ") and said in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@SAMPLE_STRATEGY.register_module('s')\nclass S: ...", "'s' of SAMPLE_STRATEGY reads the buffer"),
        ("@ADVANTAGE_FN.register_module('a')\nclass A(AdvantageFn): ...", "'a' of ADVANTAGE_FN has no process(exps)"),
        ("@ADVANTAGE_FN.register_module('a')\nclass A(GroupAdvantage): ...", "does not define calculate_group_adv"),
        (f"{LOSS}(self, logprob, rewards): ...", "L.__call__ takes 'rewards'; POLICY_LOSS_FN has logprob, "),
        (f"{LOSS}(self, logprob): ...\n    def __init__(self, width): ...", "argument 'width' of L has no default"),
        ("@KL_FN.register_module('k1')\nclass K(KLFn):\n    def calculate_kl(self, *a): ...", "built-in KL function"),
        (
            "@KL_FN.register_module('k')\nclass K(KLFn):\n    def calculate_kl(self, *a): ...\n"
            "    def update_kl_coef(self): ...",
            "'k' of KL_FN defines update_kl_coef",
        ),
        (f"{TYPE}'policy_loss_fn': 'ppo', 'clip': 1}}", "'t' of ALGORITHM_TYPE sets 'clip'; known: policy_loss_fn"),
        (f"{TYPE}'repeat_times': 2}}", "'t' of ALGORITHM_TYPE has no policy_loss_fn"),
    ],
)
def test_parts_of_algorithms_that_cannot_be_mapped_are_refused(tmp_path: Path, text: str, said: str) -> None:
    names = ["advantage_fn", "algorithm", "kl_fn", "policy_loss_fn", "sample_strategy"]
    head = ";".join(f"from trinity.algorithm.{name} import *" for name in names)
    (tmp_path / "algorithms.py").write_text(f"{head}\n{text}\n")
    message = loaded(tmp_path)
    assert message.startswith(f"{tmp_path / 'algorithms.py'}:2: ") and said in message


def test_a_reward_function_gets_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(RewardFn):
        def __init__(self, weight: float = 1.0) -> None:
            self.weight = weight

        def __call__(self, response: str, truth: str) -> dict[str, float]:
            return {"same": self.weight * (response == truth)}

    class Takes(RewardFn):
        def __call__(self, **kwargs: object) -> dict[str, float]:
            return dict.fromkeys(kwargs, 1.0)

    monkeypatch.setattr(REWARD_FUNCTIONS, "modules", {})
    item = SimpleNamespace(response="2", truth="2", prompt="1+1", task={"level": 3}, token_ids=(1,))
    assert arguments_of(Named(), item) == {"response": "2", "truth": "2"}
    REWARD_FUNCTIONS.register_module("named_of_test", Named)
    try:
        score = plugins.REWARD_FUNCTIONS["named_of_test"]
        assert score(item, {"weight": 0.5}) == {"same": 0.5} and score(item, {}) == {"same": 1.0}
        assert REWARD_FUNCTIONS.get("named_of_test") is Named
    finally:
        plugins.REWARD_FUNCTIONS.pop("named_of_test")
    assert set(Takes()(**arguments_of(Takes(), item))) == {"response", "truth", "prompt", "task"}


def test_refusals_name_sections_that_the_page_has() -> None:
    page = (ROOT / "docs/from_trinity.md").read_text()
    sections = {line.removeprefix("## ").lower().replace(" ", "-") for line in page.splitlines() if line[:3] == "## "}
    sources = [path.read_text() for path in (ROOT / "satellites/trinity_rft/src").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'NotMapped\((?:[^()]|\([^()]*\))*?"([a-z-]+)"\)', text)}
    assert len(named) >= 6 and named <= sections, named - sections


def test_a_built_in_reward_takes_the_best_of_several_right_answers() -> None:
    token = SCORE.set(lambda name, args, response, prompt, truth: {"accuracy": float(response == truth), "form": 0.1})
    try:
        scored = MathBoxedRewardFn()
        assert scored("7", truth=["5", 7]) == {"accuracy": 1.0, "form": 0.1}
        assert scored("7", truth=[5]) == scored("7", truth=5) == scored("7") == {"accuracy": 0.0, "form": 0.1}
    finally:
        SCORE.reset(token)
