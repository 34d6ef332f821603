"""Two quickstarts at once against one: seconds until both have ended, as a ratio. Limit 2.5 on two cores.

python benchmarks/at_once.py [--runs 2] [--rounds 1]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 2.5


def seconds(runs: int, seconds_at_most: float) -> float:
    """Seconds until `runs` quickstarts that start together have all ended.

    Raises subprocess.CalledProcessError where one fails, TimeoutExpired where one takes too long.
    """
    trinity = Path(sys.executable).parent / "trinity"
    command = [str(trinity), "run", "--config", "examples/quickstart/arithmetic.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        processes = []
        for number in range(runs):
            log = (Path(folder) / f"{number}.log").open("w")
            processes.append(
                subprocess.Popen([*command, f"checkpoint_root_dir={folder}/{number}"], cwd=ROOT, stdout=log, stderr=log)
            )
        try:
            for process in processes:
                rc = process.wait(timeout=max(1.0, started + seconds_at_most - time.monotonic()))
                if rc:
                    raise subprocess.CalledProcessError(rc, command)
        finally:
            for number, process in enumerate(processes):
                process.terminate()
                process.wait(timeout=60)
                print((Path(folder) / f"{number}.log").read_text()[-300:].strip(), file=sys.stderr)
        return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="how many run at once")
    parser.add_argument("--rounds", type=int, default=1, help="one and several alternate this often")
    options = parser.parse_args()
    single, several = [], []
    for _ in range(options.rounds):
        single.append(seconds(1, 1800))
        several.append(seconds(options.runs, 3600))
    one, many = statistics.median(single), statistics.median(several)
    load = "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
    print(f"{os.cpu_count()} cores: one {one:.0f} s, {options.runs} at once {many:.0f} s; {many / one:.2f} x")
    print(f"limit {LIMIT} x; load at the end {load}")


if __name__ == "__main__":
    main()
