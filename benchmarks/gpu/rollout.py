"""Rollout of a 1.5 B model on one GPU through the explorer's own path, against plain vLLM with the same settings.

    python benchmarks/gpu/rollout.py            512 sequences of 256 + 512 tokens
    python benchmarks/gpu/rollout.py --cpu --tiny

The same as benchmarks/rollout.py with the shape of a 1.5 B model: it needs one GPU and about six minutes. The explorer
returns the sampled tokens' log-probabilities, and is held against plain vLLM with them (limit 0.97) and without (0.90).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import rollout

SHAPE = {"hidden": 1536, "layers": 28, "heads": 12, "kv-heads": 2, "intermediate": 8960, "vocabulary": 151936}
WORK = {"tasks": 64, "group": 8, "prompt": 256, "response": 512}


def main() -> None:
    given = [argument for argument in sys.argv[1:] if argument != "--cpu"]
    if any(argument in ("-h", "--help") for argument in given):
        print(__doc__)
        return
    if "--cpu" not in sys.argv:
        full = {**SHAPE, **WORK}
        given = [
            "--device",
            "cuda",
            *(part for key, value in full.items() for part in (f"--{key}", str(value))),
            *given,
        ]
    rollout.main(arguments=given)


if __name__ == "__main__":
    main()
