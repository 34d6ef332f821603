"""The process that compares answers with math-verify, or matches texts with regular expressions: one JSON list
[reference, given] or [pattern, text] a line in, one verdict out. Its argument says which: math-verify or re.

The parent kills this process when a comparison takes too long. As the parent may die first, the kernel does too: every
comparison has a limit of processor time, and the process a limit of memory.
"""

import json
import logging
import re
import resource
import sys
from collections.abc import Callable

MEMORY_BYTES = 2 * 1024**3
CPU_SECONDS = 15


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _limit_processor_time()
    judge = _math_verify() if sys.argv[1] == "math-verify" else _matches
    print("ready", flush=True)
    for line in sys.stdin:
        _limit_processor_time()
        try:
            verdict = judge(*json.loads(line))
        except (Exception, RecursionError, MemoryError):
            verdict = False
        print("yes" if verdict else "no", flush=True)


def _math_verify() -> Callable[[str, str], bool]:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def same(reference: str, given: str) -> bool:
        gold = parse(f"${reference}$", parsing_timeout=None)
        answer = parse(f"${given}$", parsing_timeout=None)
        # The order matters: the reference comes first.
        return bool(gold) and bool(answer) and bool(verify(gold, answer, timeout_seconds=None))

    same("\\frac{1}{2}", "0.5")  # the first comparison is slow
    return same


def _matches(pattern: str, text: str) -> bool:
    return re.match(pattern, text, re.DOTALL | re.MULTILINE) is not None


def _limit_processor_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
