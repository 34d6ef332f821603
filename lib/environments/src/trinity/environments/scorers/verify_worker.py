"""The process that compares answers with math-verify: one JSON list [reference, given] a line in, one verdict out.

The comparison has no time limit of its own: the parent kills this process. As it may not live to do so, the kernel does
too: every comparison has a limit of processor time, and the process one of memory.
"""

import json
import logging
import resource
import sys

MEMORY_BYTES = 2 * 1024**3
CPU_SECONDS = 15


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _limit_processor_time()
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def same(reference: str, given: str) -> bool:
        gold = parse(f"${reference}$", parsing_timeout=None)
        answer = parse(f"${given}$", parsing_timeout=None)
        # The order matters: the reference comes first.
        return bool(gold) and bool(answer) and bool(verify(gold, answer, timeout_seconds=None))

    same("\\frac{1}{2}", "0.5")  # the first comparison is slow
    print("ready", flush=True)
    for line in sys.stdin:
        _limit_processor_time()
        try:
            verdict = same(*json.loads(line))
        except (Exception, RecursionError, MemoryError):
            verdict = False
        print("same" if verdict else "different", flush=True)


def _limit_processor_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
