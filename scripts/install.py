"""Install locks and folders into the environment of this Python: with uv, or with pip where uv cannot.

    .venv/bin/python scripts/install.py requirements/run.txt requirements/torch-cpu.txt .

Each argument is a lock, whose hashes are checked, or a folder, which is installed editable. uv comes from the package
index, in the version of a lock. It downloads and unpacks in parallel, and compiles nothing: Python compiles what it
imports. uv does not read pip's configuration, so this script passes on the indexes, certificates, proxy and time limit
that pip would use. PyTorch's own index is asked only for torch-cpu.txt, where no configured index has it.
"""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PYTORCH = "https://download.pytorch.org/whl/cpu"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
UV = Path(sysconfig.get_path("scripts")) / "uv"
LARGE_MEGABYTES = 5.0  # the download of a larger package is worth a line
_UV_SIZE = re.compile(r"^Downloading (\S+) \(([\d.]+)(MiB|GiB)\)")
_UV_DONE = re.compile(r"^ Downloaded (\S+)")
_PIP_SIZE = re.compile(r"^ *Downloading (?:\S*/)?([^\s/-]+)-\S+ \(([\d.]+) (MB|GB)\)")
_WORTH_A_LINE = re.compile(r"^ *(Building \S+|Installed \d+ packages?|Successfully installed)")


def main(arguments: list[str]) -> None:
    started = time.monotonic()
    environment, options = from_pip(pip_settings())
    # Among all indexes the best match, as pip chooses it; the hashes make that safe.
    uv = [str(UV), "pip", "install", "--python", sys.executable, "--index-strategy", "unsafe-best-match", *options]
    pip = [*PIP, "install"]
    installers = [uv, pip] if _install_uv([name for name in arguments if not Path(name).is_dir()]) else [pip]
    for name in arguments:
        if Path(name).is_dir():
            what = ["--no-deps", "--no-build-isolation", "-e", name]
        else:
            what = ["--no-deps", "--require-hashes", "-r", name]
        commands = [[*installer, *what] for installer in installers]
        if Path(name).name == "torch-cpu.txt":
            commands = [[*command, *more] for command in commands for more in ([], ["--extra-index-url", PYTORCH])]
        failures: list[str] = []
        for command in commands:
            if failures and command[: len(pip)] == pip and PYTORCH not in command:
                print(f"uv cannot install {name}, so pip tries", flush=True)
            code, output = _run(command, environment, started)
            if code == 0:
                break
            failures.append(f"{' '.join(command)}\n{output}")
        else:
            sys.exit(f"{name} cannot be installed:\n\n" + "\n".join(failures))


def pip_settings() -> dict[str, str]:
    """Returns pip's options by name: files, then their [install] sections, then PIP_ variables, as pip ranks them."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.partition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def from_pip(settings: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns uv's environment variables and options for pip's settings.

    Indexes go by variables, since their addresses may hold passwords and every user can list arguments.
    """
    variables = {
        "UV_INDEX_URL": settings.get("index-url"),
        "UV_EXTRA_INDEX_URL": " ".join(settings.get("extra-index-url", "").split()),
        "UV_HTTP_TIMEOUT": settings.get("timeout", settings.get("default-timeout")),
        "SSL_CERT_FILE": settings.get("cert"),
        "SSL_CLIENT_CERT": settings.get("client-cert"),
        "HTTPS_PROXY": settings.get("proxy"),
        "HTTP_PROXY": settings.get("proxy"),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
    }
    environment = dict(os.environ) | {name: value for name, value in variables.items() if value}
    options = []
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    for place in settings.get("find-links", "").split():
        options += ["--find-links", place]
    for host in settings.get("trusted-host", "").split():
        options += ["--allow-insecure-host", host]
    return environment, options


def _install_uv(locks: list[str]) -> bool:
    """Installs uv in a lock's version, with that lock's hashes. Returns False if no lock has it or pip cannot."""
    if UV.exists():
        return True
    for lock in locks:
        entry = re.search(r"^uv==(?:.*\\\n)+.*\n", Path(lock).read_text(), re.MULTILINE)
        if entry:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
                file.write(entry[0])
                file.flush()
                command = [*PIP, "install", "--quiet", "--no-deps", "--require-hashes", "-r", file.name]
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"uv cannot be installed, so pip installs everything: {done.stderr.strip()[-300:]}", flush=True)
            return done.returncode == 0
    return False


def _run(command: list[str], environment: dict[str, str], started: float) -> tuple[int, str]:
    """Runs an installation, and prints a line for each large package. Returns its exit code and output."""
    sizes: dict[str, str] = {}
    output = []
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if size := _UV_SIZE.match(line):
            if size[3] == "GiB" or float(size[2]) >= LARGE_MEGABYTES:
                sizes[size[1]] = f"{size[2]} {size[3]}"
            continue
        shown = ""
        if done := _UV_DONE.match(line):
            shown = f"{done[1]} ({sizes[done[1]]})" if done[1] in sizes else ""
        elif size := _PIP_SIZE.match(line):
            shown = f"{size[1]} ({size[2]} {size[3]})" if size[3] == "GB" or float(size[2]) >= LARGE_MEGABYTES else ""
        elif notable := _WORTH_A_LINE.match(line):
            shown = notable[1]
        if shown:
            print(f"{time.monotonic() - started:5.0f} s  {shown}", flush=True)
    return process.wait(), "".join(output)


if __name__ == "__main__":
    main(sys.argv[1:])
