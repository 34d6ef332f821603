"""Names the private names that a not installed version of vLLM or DeepSpeed lacks.

Run in tests/: `python -m contract.symbols.when_vllm_moves --sources FOLDER --version 0.33.0 [--library vllm]` names
what an unpacked wheel lacks, and exits with 1.
"""

import argparse
import sys
from pathlib import Path

from contract.symbols.private_symbols import BORDERS
from contract.symbols.symbols_in_sources import parse, problem_of


def main() -> None:
    """Prints the names that an unpacked wheel lacks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sources", type=Path, required=True, help="a folder that has the library's package")
    parser.add_argument("--library", default="vllm")
    parser.add_argument("--version", required=True, help="of the sources")
    options = parser.parse_args()
    missing = [
        f"{name}: {problem}"
        for border in BORDERS
        for name in border.names
        if name.startswith((f"{options.library}.", f"{options.library}:")) and parse(name).exists_in(options.version)
        if (problem := problem_of(name, options.sources)) is not None
    ]
    sys.exit("\n".join(missing) or None)


if __name__ == "__main__":
    main()
