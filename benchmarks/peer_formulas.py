"""Record gradients and advantages of veRL's, Trinity-RFT's, M2PO's and TRL's own code on our random batches.

    python benchmarks/peer_formulas.py --verl FOLDER --trinity-rft FOLDER --m2po FOLDER --trl FOLDER

Each folder holds an unpacked source (`verl/`, `trinity/`, `verl/`, `trl/`); none is installed. Packages that they
import and that are missing here are replaced by empty stand-ins: the formulas need only torch. Writes
tests/support/checks/losses/recorded.json, which docs/algorithms_measured.md is measured against. A peer without a
folder keeps its record.
"""

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests/support/checks/losses/recorded.json"
BATCHES = 12
Recorded = dict[str, list[list[list[float]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path)
    args = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.pt"
        torch.save(_inputs(), inputs)
        found: dict[str, Recorded] = json.loads(TARGET.read_text())
        for name in (name for name in PEERS if args[name.replace("-", "_")] is not None):
            command = [sys.executable, __file__, "--child", name, str(args[name.replace("-", "_")]), str(inputs)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found[name] = json.loads(done.stdout)
    TARGET.write_text(json.dumps(found, separators=(",", ":")).replace("]]],", "]]],\n") + "\n")


def _inputs() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.checks.losses.loss_cases import case_of
    from support.checks.losses.plain_advantages import rollouts_of

    cases, rollouts = [], []
    for seed in range(BATCHES):
        case = case_of(seed, "token-mean")
        names = ("logprobs", "old_logprobs", "advantages", "reference_logprobs", "mask", "expert_B")
        numbers = {"numbers": torch.tensor(case.numbers)}
        cases.append({name: getattr(case.x, name).detach() for name in names} | numbers)
        made = rollouts_of(seed, values=True)
        assert made.values is not None
        assert made.trajectories_N is not None and made.steps_N is not None
        rows = {"rewards": made.rewards_N, "groups": made.groups_N, "masks": made.masks, "values": made.values}
        rows |= {"runs": made.trajectories_N, "steps": made.steps_N, "facts": made.facts}
        rows |= {"logprobs": made.logprobs, "teachers": made.teachers}
        rollouts.append({name: list(values) for name, values in rows.items() if values is not None})
    return {"cases": cases, "rollouts": rollouts}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules of the packages named."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        wanted = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> ModuleType:
        made = ModuleType(spec.name)
        made.__path__ = []
        made.__getattr__ = lambda name: _dummy(name)  # type: ignore[method-assign]
        return made

    def exec_module(self, module: ModuleType) -> None: ...


def _dummy(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (dict,), {"__getattr__": lambda self, key: None, "__class_getitem__": lambda cls, key: cls})


def _bare(folder: Path, *packages: str) -> None:
    """Makes packages importable without their __init__, which would load whole frameworks."""
    for package in packages:
        made = ModuleType(package)
        made.__path__ = [str(folder / package.replace(".", "/"))]
        sys.modules[package] = made


def verl(folder: Path, inputs: Mapping[str, Any]) -> Recorded:
    _bare(folder, "verl", "verl.utils", "verl.trainer", "verl.trainer.ppo")
    groupwise = importlib.import_module("verl.utils.groupwise")
    utils: Any = sys.modules["verl.utils"]
    utils.as_torch_index, utils.group_mean_std = groupwise.as_torch_index, groupwise.group_mean_std
    for name in ("verl.trainer.config", "verl.workers", "verl.workers.config"):
        sys.modules[name] = _StandIns().create_module(SimpleNamespace(name=name))
    config_of: Any = type("ActorConfig", (SimpleNamespace,), {"get": _get})
    algo: Any = type("AlgoConfig", (SimpleNamespace,), {"get": _get})
    sys.modules["verl.workers.config"].ActorConfig = config_of  # type: ignore[attr-defined]
    sys.modules["verl.trainer.config"].AlgoConfig = algo  # type: ignore[attr-defined]
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    shared = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    policy = SimpleNamespace(clip_cov_ratio=1.0, clip_cov_ub=5.0, clip_cov_lb=1.0, kl_cov_ratio=0.0002, ppo_kl_coef=1.0)
    config = config_of(**shared, global_batch_info={}, tau_pos=1.0, tau_neg=1.05, policy_loss=policy)

    def loss(name: str, mode: str, weigh: bool = False) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
        def of(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
            weights = (x["reference_logprobs"] - x["old_logprobs"]).exp().clamp(max=2.0) if weigh else None
            found = core.get_policy_loss_fn(name)(
                old_log_prob=x["old_logprobs"], log_prob=x["logprobs"], advantages=x["advantages"],
                response_mask=x["mask"], loss_agg_mode=mode, config=config, rollout_is_weights=weights,
            )  # fmt: skip
            return found[0]

        return of

    token, mean = "token-mean", "seq-mean-token-mean"
    names = {"ppo": ("vanilla", token), "gspo": ("gspo", mean), "sapo": ("sapo", mean), "opmd": ("gpg", token)}
    names |= {"gmpo": ("geo_mean", token), "cispo": ("cispo", token), "kl_cov": ("kl_cov", token)}
    names |= {"clip_cov": ("clip_cov", token), "dppo_tv": ("dppo_tv", token), "dppo_kl": ("dppo_kl", token)}
    found = {name: _gradients(loss(*which), inputs, filled=name == "gmpo") for name, which in names.items()}
    found["gmpo, weighed"] = _gradients(loss("geo_mean", token, weigh=True), inputs, filled=True)
    settings = algo(gamma=1.0, lam=1.0, norm_adv_by_std_in_grpo=True)

    def advantages(name: str) -> Iterator[list[list[float]]]:
        for r in inputs["rollouts"]:
            rewards, values, mask = _padded(r)
            groups = np.array([f"g{int(group)}" for group in r["groups"]])
            if name == "gae":
                made = core.compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
            else:
                estimator = core.get_adv_estimator_fn(name)
                made = estimator(token_level_rewards=rewards, response_mask=mask, index=groups, config=settings)
            yield _rows(made[0], mask)

    theirs = {"reinforceplusplus": "reinforce_plus_plus", "grpo": "grpo", "rloo": "rloo", "ppo": "gae"}
    found |= {f"advantage {name}": list(advantages(estimator)) for name, estimator in theirs.items()}
    return found


def trinity_rft(folder: Path, inputs: Mapping[str, Any]) -> Recorded:
    _bare(folder, "trinity", "trinity.algorithm", "trinity.algorithm.policy_loss_fn", "trinity.algorithm.advantage_fn")
    _bare(folder, "trinity.utils")
    package: Any = sys.modules["trinity.algorithm.policy_loss_fn"]
    package.PolicyLossFn = importlib.import_module("trinity.algorithm.policy_loss_fn.policy_loss_fn").PolicyLossFn
    files = {
        "ppo": ("ppo_policy_loss", "PPOPolicyLossFn"), "gspo": ("gspo_policy_loss", "GSPOLossFn"),
        "cispo": ("cispo_policy_loss", "CISPOPolicyLossFn"), "sapo": ("sapo_policy_loss", "SAPOPolicyLossFn"),
        "topr": ("topr_policy_loss", "TOPRPolicyLossFn"), "sppo": ("sppo_loss_fn", "sPPOPolicyLossFn"),
        "opmd": ("opmd_policy_loss", "OPMDPolicyLossFn"), "rec": ("rec_policy_loss", "RECPolicyLossFn"),
        "importance_sampling": ("importance_sampling_policy_loss", "ImportanceSamplingLossFn"),
        "sft": ("sft_loss", "SFTLossFn"), "sft_is": ("chord_policy_loss", "SFTISLossFn"),
        "sft_phi": ("chord_policy_loss", "SFTPhiLossFn"), "dpo": ("dpo_loss", "DPOLossFn"),
        "mix": ("mix_policy_loss", "MIXPolicyLossFn"), "mix_chord": ("chord_policy_loss", "MIXCHORDPolicyLossFn"),
    }  # fmt: skip

    def loss(kind: Any, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows, expert = len(x["mask"]), x["expert_B"] > 0
        mixed = kind.__name__.startswith("MIX")
        sizes = {"train_batch_size_usual": max(rows - 1, 1), "train_batch_size_expert": 1} if mixed else {}
        made = kind(backend="verl", **kind.default_args(), **sizes)
        if not rows % 2 or not kind.__name__.startswith("DPO"):
            return made(
                logprob=x["logprobs"], old_logprob=x["old_logprobs"], action_mask=x["mask"],
                advantages=x["advantages"], ref_logprob=x["reference_logprobs"], expert_mask=expert,
                step=torch.ones(rows),
            )[0]  # fmt: skip
        return x["logprobs"].sum() * 0

    found: Recorded = {}
    for name, (file, kind) in files.items():
        module = importlib.import_module(f"trinity.algorithm.policy_loss_fn.{file}")
        actual = getattr(module, kind, None) or next(
            value for key, value in vars(module).items() if key.lower() == kind.lower()
        )
        found[name] = _gradients(lambda x, actual=actual: loss(actual, x), inputs, filled=name == "gspo")
    return found | _trinity_rfts_advantages(folder, inputs)


def _trinity_rfts_advantages(folder: Path, inputs: Mapping[str, Any]) -> Recorded:
    """Functions of groups get experiences, those of the trainer get padded batches."""
    _bare(folder, "trinity.common")
    package: Any = sys.modules["trinity.algorithm.advantage_fn"]
    base = importlib.import_module("trinity.algorithm.advantage_fn.advantage_fn")
    package.AdvantageFn, package.GroupAdvantage = base.AdvantageFn, base.GroupAdvantage
    of_groups = {
        "grpo": ("grpo_advantage", "GRPOGroupedAdvantage"), "opmd": ("opmd_advantage", "OPMDGroupAdvantage"),
        "asymre": ("asymre_advantage", "ASYMREGroupAdvantage"), "rec": ("rec_advantage", "RECGroupedAdvantage"),
        "reinforce": ("reinforce_advantage", "REINFORCEGroupAdvantage"),
        "step_wise_grpo": ("multi_step_grpo_advantage", "StepWiseGRPOAdvantageFn"),
        "gigpo": ("gigpo_advantage", "GiGPOAdvantageFn"),
    }  # fmt: skip
    of_batches = {
        "rloo": ("rloo_advantage", "RLOOAdvantageFn"), "remax": ("remax_advantage", "REMAXAdvantageFn"),
        "ppo": ("ppo_advantage", "PPOAdvantageFn"), "jsd": ("jsd_advantage", "JSDAdvantage"),
        "reinforceplusplus": ("reinforce_plus_plus_advantage", "REINFORCEPLUSPLUSAdvantageFn"),
        "on_policy_distill": ("on_policy_distill_advantage", "OnPolicyDistillAdvantage"),
    }  # fmt: skip
    found: Recorded = {}
    for name, (file, kind) in {**of_groups, **of_batches}.items():
        module = importlib.import_module(f"trinity.algorithm.advantage_fn.{file}")
        made = getattr(module, kind)(**getattr(module, kind).default_args())
        run = _of_experiences if name in of_groups else _of_padded
        found[f"advantage {name}"] = [run(made, r) for r in inputs["rollouts"]]
    return found


def _of_experiences(compute: Any, r: Mapping[str, Any]) -> list[list[float]]:
    kept = []
    for index, mask in enumerate(r["masks"]):
        task, run, step = (int(r[name][index]) for name in ("groups", "runs", "steps"))
        names = {"tid": f"{task}", "rid": f"{task}/{run}", "sid": f"{task}/{step}"}
        eid = SimpleNamespace(task=task, run=run, step=step, **names)
        kept.append(
            SimpleNamespace(
                eid=eid, reward=float(r["rewards"][index]), action_mask=mask, info=r["facts"][index],
                logprobs=r["logprobs"][index], advantages=torch.full(mask.shape, float("nan")), metrics={},
            )
        )  # fmt: skip
    sizes = [sum(int(g) == int(group) for g in r["groups"]) for group in r["groups"]]
    several = [one for one, size in zip(kept, sizes, strict=True) if size > 1]
    given = several if "REC" in type(compute).__name__ else kept  # which fails in a group of one
    if given:  # workflows there give the steps of a run in order
        compute(sorted(given, key=lambda one: one.eid.step))
    return [_row(exp.advantages, exp.action_mask) for exp in kept]


def _of_padded(compute: Any, r: Mapping[str, Any]) -> list[list[float]]:
    rewards, values, mask = _padded(r)
    batch = {"token_level_rewards": rewards, "values": values, "response_mask": mask}
    for name, source in (("old_log_probs", "logprobs"), ("teacher_logprobs", "teachers")):
        batch[name] = torch.zeros_like(mask)
        for row, given in enumerate(r[source]):
            batch[name][row, : len(given)] = given
    greedy: dict[int, list[float]] = {}
    for group, reward, fact in zip(r["groups"], r["rewards"], r["facts"], strict=True):
        greedy.setdefault(int(group), []).extend([float(reward)] if fact["greedy"] else [])
    means = [np.mean(greedy[int(group)] or [0.0]) for group in r["groups"]]
    batch["reward_baselines"] = torch.tensor(np.array(means))
    index = np.array([f"g{int(group)}" for group in r["groups"]])
    compute(SimpleNamespace(batch=batch, non_tensor_batch={"uid": index}))
    rows = _rows(batch["advantages"], mask)
    if "REMAX" in type(compute).__name__:  # a greedy rollout is only a baseline
        nothing = float("nan")
        return [[nothing] * len(row) if f["greedy"] else row for row, f in zip(rows, r["facts"], strict=True)]
    return rows


def m2po(folder: Path, inputs: Mapping[str, Any]) -> Recorded:
    """In double precision: their bound is 1e-12 inside of a token, which single precision's exp rounds away at will."""
    torch.set_default_dtype(torch.float64)
    _bare(folder, "verl", "verl.utils", "verl.trainer", "verl.trainer.ppo")
    core = importlib.import_module("verl.trainer.ppo.core_algos")

    def loss(x: Mapping[str, torch.Tensor], budget: float) -> torch.Tensor:
        advantages = x["advantages"][:, :1].expand_as(x["mask"])  # the sign of a sequence is that of its first token
        return core.compute_m2po_policy_loss(
            x["old_logprobs"], x["logprobs"], advantages, x["mask"], M2_budget=budget, miniclip_low=None,
            miniclip_high=None,
        )[0]  # fmt: skip

    return {f"m2po {budget}": _gradients(lambda x, b=budget: loss(x, b), inputs) for budget in (0.04, 0.3)}


def trl(folder: Path, inputs: Mapping[str, Any]) -> Recorded:
    """The trainers' methods `_compute_loss`, cut out of their files: an import would load models. A sequence has one
    advantage there, that of its first token here.
    """
    torch.set_default_dtype(torch.float64)
    grpo = _method(folder / "trl/trainer/grpo_trainer.py", "GRPOTrainer")
    gmpo = _method(folder / "trl/experimental/gmpo/gmpo_trainer.py", "GMPOTrainer")
    dpo = _method(folder / "trl/trainer/dpo_trainer.py", "DPOTrainer")

    def of_grpo(x: Mapping[str, torch.Tensor], compute: Any = grpo, level: str = "token", **more: Any) -> torch.Tensor:
        trainer = _trainer(importance_sampling_level=level, **{"epsilon_low": 0.2, "epsilon_high": 0.2} | more)
        trainer._get_per_token_logps_and_entropies.return_value = x["logprobs"], torch.zeros_like(x["mask"]), None
        nothing = torch.zeros(len(x["mask"]), 1)
        given = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": x["mask"], "completion_mask": x["mask"],
            "advantages": x["advantages"][:, 0], "old_per_token_logps": x["old_logprobs"],
            "num_items_in_batch": x["mask"].sum(),
        }  # fmt: skip
        return compute(trainer, trainer.model, given)

    def of_dpo(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        numbers = x["numbers"].tolist()
        pairs = range(1, max(numbers) + 1)
        order = [numbers.index(k) for k in pairs] + [numbers.index(-k) for k in pairs]
        trainer = _trainer(beta=0.1)
        mask = torch.nn.functional.pad(x["mask"][order], (1, 0))
        reference = (x["reference_logprobs"] * x["mask"]).sum(-1)[order]
        ours = (x["logprobs"] * x["mask"])[order]
        nothing = torch.zeros_like(ours)
        outputs = SimpleNamespace(log_probs=ours, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
        given = {"completion_mask": mask, "attention_mask": mask, "input_ids": torch.zeros_like(mask, dtype=torch.long)}
        given |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference.chunk(2), strict=True))
        return dpo(trainer, lambda **_: outputs, given, False)

    losses: dict[str, Callable[[Mapping[str, torch.Tensor]], torch.Tensor]] = {
        "ppo": lambda x: of_grpo(x, loss_type="bnpo"),
        "gspo": lambda x: of_grpo(x, level="sequence", loss_type="grpo"),
        "cispo": lambda x: of_grpo(x, loss_type="cispo", epsilon_high=5.0),
        "sapo": lambda x: of_grpo(x, loss_type="sapo"),
        "gmpo": lambda x: of_grpo(x, gmpo, epsilon_low=0.4, epsilon_high=0.4),
        "dpo": of_dpo,
    }
    return {name: _gradients(loss, inputs, filled=name in ("gspo", "sapo", "gmpo")) for name, loss in losses.items()}


def _method(file: Path, kind: str, name: str = "_compute_loss") -> Any:
    (found,) = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef) and one.name == kind]
    (method,) = [one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == name]
    space: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "F": torch.nn.functional,
        "nanmin": torch.amin,
        "nanmax": torch.amax,
    }
    exec(compile(ast.Module([method], []), str(file), "exec"), space)
    return space[name]


def _trainer(**settings: Any) -> MagicMock:
    """A trainer with TRL's defaults. It drops metrics."""
    args = SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1)
    args.use_bias_correction_kl = False
    off = dict.fromkeys(
        ("_entropy_bonus_enabled", "use_vllm", "aux_loss_enabled", "use_adaptive_entropy", "use_weighting"), False
    )
    none = dict.fromkeys(("off_policy_mask_threshold", "ld_alpha"))
    of_dpo = {"precompute_ref_logps": True, "f_divergence_type": "reverse_kl", "label_smoothing": 0.0}
    of_dpo |= {"loss_types": ["sigmoid"], "loss_weights": [1.0], "_total_train_tokens": 0, "_tp_size": 1}
    accelerator = MagicMock(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, device="cpu")
    accelerator.gather_for_metrics = accelerator.gather
    usual = {"beta": 0.0, "top_entropy_quantile": 1.0, "current_gradient_accumulation_steps": 1, "args": args}
    return MagicMock(**{**off, **none, **of_dpo, **usual, "accelerator": accelerator, **settings})


def _get(self: Any, key: str, default: Any = None) -> Any:
    return getattr(self, key, default)


def _gradients(
    loss: Callable[[Mapping[str, torch.Tensor]], torch.Tensor], inputs: Mapping[str, Any], filled: bool = False
) -> list[list[list[float]]]:
    """filled: only of sequences with tokens; others would count in their means."""
    found = []
    for case in inputs["cases"]:
        kept = case["mask"].any(-1) if filled else torch.ones(len(case["mask"]), dtype=torch.bool)
        x = {name: values[kept] for name, values in case.items()}
        x["logprobs"] = x["logprobs"].clone().requires_grad_()
        value = loss(x)
        made = torch.autograd.grad(value, x["logprobs"], allow_unused=True)[0] if value.requires_grad else None
        gradient = torch.zeros_like(case["mask"])
        gradient[kept] = 0.0 if made is None else made
        found.append(_rows(gradient, case["mask"]))
    return found


def _rows(values: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    return [_row(row, flags) for row, flags in zip(values, mask, strict=True)]


def _row(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return [float(f"{number:.12g}") for number in values[mask > 0].tolist()]


def _padded(rollouts: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rewards, at the last action token or before a response without any, values and the mask."""
    masks = rollouts["masks"]
    mask = torch.zeros(len(masks), max(map(len, masks)) + 1, dtype=torch.float64)
    rewards, values = torch.zeros_like(mask), torch.zeros_like(mask)
    for row, flags in enumerate(masks):
        mask[row, : len(flags)] = flags.double()
        values[row, : len(flags)] = rollouts["values"][row]
        last = int(flags.nonzero()[-1]) if flags.any() else 0
        rewards[row, last] = rollouts["rewards"][row]
    return rewards, values, mask


PEERS: dict[str, Callable[[Path, Mapping[str, Any]], Recorded]] = {
    "verl": verl,
    "trinity-rft": trinity_rft,
    "m2po": m2po,
    "trl": trl,
}

if __name__ == "__main__":
    if sys.argv[1] == "--child":
        name, source, given = sys.argv[2:]
        sys.meta_path.insert(0, _StandIns("tensordict", "transformers", "ray", "omegaconf", "datasets", "flash_attn"))
        sys.meta_path.append(_StandIns("verl", "trinity"))
        sys.path.insert(0, source)
        with contextlib.redirect_stdout(io.StringIO()):
            recorded = PEERS[name](Path(source), torch.load(given))
        print(json.dumps(recorded))
    else:
        main()
