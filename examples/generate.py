"""Write the YAMLs of examples/algorithms and examples/R3L: `make docs`. A test compares them with what this writes.

python examples/generate.py [--check]
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """Returns every file and its text."""
    found: dict[Path, str] = {}
    for script in ("algorithms/make.py", "R3L/make_configs.py"):
        spec = importlib.util.spec_from_file_location(Path(script).stem, FOLDER / script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found |= module.files()
    return found


if __name__ == "__main__":
    old = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit("; ".join(f"{path.relative_to(FOLDER)} is old, run `make docs`" for path in old) or None)
    for path in old:
        path.write_text(files()[path])
