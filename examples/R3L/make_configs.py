"""Write every YAML of the R3L experiments: environments x algorithms x model sizes, each environment from one template.

    .venv/bin/python examples/R3L/make_configs.py            # writes <environment>/<algorithm>_<size>.yaml
    .venv/bin/python examples/R3L/make_configs.py --check    # says which files it would change; exit code 1

A template is <environment>/template.yaml. @NAME@, @GPUS@ and the like are replaced; everything that depends on the
algorithm stands in ALGORITHMS, everything that depends on the model in SIZES. Change these and write anew: the YAMLs
themselves are not edited.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
HEADER = "# Written by examples/R3L/make_configs.py from {template}; change that, and write anew.\n"


@dataclass(frozen=True)
class Algorithm:
    """`title`: its part of the run's name. `lines`: below `algorithm`. `operators`: what experience goes through."""

    title: str
    lines: tuple[str, ...]
    operators: tuple[str, ...] = ()
    workflow: str = "grpo_baseline"


@dataclass(frozen=True)
class Size:
    """Of 8 GPUs, `engines` roll out and the others train."""

    model: str
    engines: int


ALGORITHMS = {
    "grpo": Algorithm("GRPO_Baseline", ("algorithm_type: grpo",)),
    "dapo": Algorithm(
        "DAPO_Baseline",
        ("algorithm_type: dapo",),
        ("{name: dapo_dynamic_sampling_filter, args: {metric_key: success}}", "{name: mask_response_truncated}"),
    ),
    "opmd": Algorithm("OPMD_Baseline", ("algorithm_type: opmd",), ("{name: opmd_filter}",)),
    "RAFT": Algorithm("RAFT_Baseline", ("algorithm_type: raft",), ("{name: raft_filter}",)),
    "opmd_reweight_adv": Algorithm(
        "OPMD_Reweight_Adv", ("algorithm_type: opmd_reweight_adv",), ("{name: opmd_filter}",)
    ),
    "opmd_R3L": Algorithm("OPMD_R3L", ("algorithm_type: opmd_reweight_adv",), ("{name: opmd_filter}",), "R3L"),
}
SIZES = {
    "1.5B": Size("Qwen/Qwen2.5-1.5B-Instruct", 6),
    "7B": Size("Qwen/Qwen2.5-7B-Instruct", 4),
}
ENVIRONMENTS = ("alfworld", "webshop", "scienceworld", "dapo", "countdown", "sokoban", "gym_card")


def configs() -> dict[Path, str]:
    """Every file and its text."""
    found = {}
    for environment in ENVIRONMENTS:
        template = FOLDER / environment / "template.yaml"
        text = HEADER.format(template=f"{environment}/template.yaml") + template.read_text()
        for name, algorithm in ALGORITHMS.items():
            for size in SIZES:
                found[FOLDER / environment / f"{name}_{size}.yaml"] = fill(text, environment, algorithm, size)
    return found


def fill(text: str, environment: str, algorithm: Algorithm, size: str) -> str:
    model = SIZES[size]
    operators = "".join(f"\n    - {operator}" for operator in algorithm.operators)
    values = {
        "NAME": f"{environment.upper()}_RFT_Qwen_{size}_{algorithm.title}",
        "MODEL": model.model,
        "ENGINES": str(model.engines),
        "ALGORITHM": "\n  ".join(algorithm.lines),
        "WORKFLOW": f"{algorithm.workflow}_{environment}_workflow",
        "OPERATORS": operators or " []",
    }
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    if "@" in text:
        raise SystemExit(f"{environment}/template.yaml: unknown placeholder in {text[text.index('@') :][:30]!r}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    differ = [path for path, text in configs().items() if not path.exists() or path.read_text() != text]
    for path in differ:
        print(f"{'differs' if check else 'written'}: {path.relative_to(FOLDER)}")
        if not check:
            path.write_text(configs()[path])
    return int(check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
