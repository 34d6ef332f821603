"""Two explorers in containers with the network of their machine are two processes, although both are process 1."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.core

_SAYS = (
    "import os; from trinity.weights.client import host_name; print(os.getpid(), host_name(), sep=chr(10), flush=True)"
)
_WAITS = f"{_SAYS}; input()"  # a namespace that has ended gives its number to the next


def test_processes_of_two_pid_namespaces_differ() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", _WAITS]
    if subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a PID namespace")
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        said = [tuple(str(one.stdout and one.stdout.readline()).strip() for _ in range(2)) for one in both]
    finally:
        for one in both:
            one.communicate("", timeout=30)
    assert {pid for pid, _ in said} == {"1"}
    assert len({host for _, host in said}) == 2, said
