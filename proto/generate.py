"""Regenerate the committed stubs, or compare them with the .proto files.

    python proto/generate.py           write trinity/api/**/*_pb2{,_grpc}.py and .pyi
    python proto/generate.py --check   exit 1 and name the files that differ

The generator is pinned and deliberately old: its code runs under every newer protobuf, never the reverse. A separate
virtual environment (build/protoc) keeps it out of the dependencies.
"""

import argparse
import filecmp
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

GENERATOR = ("grpcio-tools==1.71.2", "setuptools<81")
ROOT = Path(__file__).resolve().parent


def generator_python() -> Path:
    """Returns the interpreter of the generator's environment, made on first use."""
    home = ROOT.parent / "build" / "protoc"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *GENERATOR], check=True)
        (home / "ready").touch()
    return python


def generate(out: Path) -> None:
    protos = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("trinity/api/*/v1/*.proto"))]
    command = [str(generator_python()), "-m", "grpc_tools.protoc", "-I."]
    outs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run([*command, *outs, *protos], cwd=ROOT, check=True)
    for package in ("common", "tinker"):  # files without services
        for path in out.glob(f"trinity/api/{package}/v1/*_pb2_grpc.py"):
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        made = {p.relative_to(fresh) for p in Path(fresh).rglob("*_pb2*")}
        have = {p.relative_to(ROOT) for p in ROOT.glob("trinity/**/*_pb2*") if "__pycache__" not in p.parts}
        stale = [p for p in made & have if not filecmp.cmp(Path(fresh, p), ROOT / p, shallow=False)]
        wrong = sorted(map(str, (made ^ have) | set(stale)))
    if wrong:
        print("stubs differ from the .proto files (run `make proto`):", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
