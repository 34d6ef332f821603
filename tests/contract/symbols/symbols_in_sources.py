"""Looks names up in a library's sources without importing it, and lists the names that the product takes."""

import ast
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(
    r"(?P<module>[\w.]+):(?P<path>[\w.*]+)(\((?P<parameters>.*)\))?"
    r"( since (?P<since>[\d.]+))?( until (?P<until>[\d.]+))?"
)
_FOLLOWED = 8  # imports from one module to the next, until a name's definition
_FOREIGN = ("torch", "transformers", "peft")
_PUBLIC = {"_replace", "_asdict", "_exit"}  # documented despite the underscore
_OURSELVES = (("self",), ("cls",))
_BY_STRING = ("getattr", "hasattr", "setattr")


class Name(NamedTuple):
    module: str
    path: tuple[str, ...]
    parameters: tuple[str, ...]
    since: str
    until: str

    def exists_in(self, version: str) -> bool:
        """Returns True if this version should have the name; `since` and `until` are minor versions, both included."""
        minor = _minor(version)
        return _minor(self.since or "0") <= minor <= _minor(self.until or "999")

    @property
    def dotted(self) -> str:
        return ".".join((self.module, *self.path))


def parse(text: str) -> Name:
    found = _NAME.fullmatch(text)
    assert found is not None, f"{text!r}: write module:attribute.path or module:attribute.path(parameter, ...)"
    parameters = tuple((found["parameters"] or "").replace(",", " ").split())
    return Name(
        found["module"], tuple(found["path"].split(".")), parameters, found["since"] or "", found["until"] or ""
    )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())


def installed(library: str) -> Path | None:
    """Returns the folder of the library's package."""
    found = importlib.util.find_spec(library)
    return None if found is None or found.origin is None else Path(found.origin).parents[1]


def problem_of(text: str, sources: Path) -> str | None:
    """Returns the part of a name that the sources below the folder lack, or None."""
    name = parse(text)
    if name.module.startswith("torch.ops."):  # C++ operators are in no Python source
        import torch

        operators = getattr(torch.ops, name.module.removeprefix("torch.ops."))
        return None if hasattr(operators, name.path[0]) else f"there is no operator {name.dotted}"
    if not _files(sources, name.module):
        return f"there is no module {name.module}"
    if name.path[0] == "*":
        trees = [_tree(file) for file in _files(sources, name.module)]
        stored = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        set_there = any(node.attr == name.path[1] and isinstance(node.ctx, ast.Store) for node in stored)
        return None if set_there else f"nothing in {name.module} sets {name.path[1]}"
    node = _definition(sources, name.module, name.path[0])
    for index, part in enumerate(name.path[1:], 1):
        if node is None:
            break
        node = _member(node, part)
        if node is None:
            return f"{name.module}:{'.'.join(name.path[:index])} has no {part}"
    if node is None:
        return f"{name.module} has no {name.path[0]}"
    missing = _missing_parameters(node, name.parameters)
    return f"{'.'.join(name.path)} does not take {', '.join(missing)}" if missing else None


def _files(sources: Path, module: str) -> list[Path]:
    base = sources.joinpath(*module.split("."))
    candidates = [base.with_suffix(".py"), base.with_suffix(".pyi"), base / "__init__.py", base / "__init__.pyi"]
    return [file for file in candidates if file.is_file()]


@cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Returns all nodes of a file, walked once."""
    return list(ast.walk(tree))


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _definition(sources: Path, module: str, name: str, depth: int = 0) -> ast.AST | None:
    """Finds the definition of a name at a module's top level, following imports."""
    if depth > _FOLLOWED:
        return None
    for file in _files(sources, module):
        package = module if file.stem == "__init__" else module.rpartition(".")[0]
        for node in _top_level(_tree(file)):
            if name in _bound(node):
                return node
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(node, package)
                for alias in node.names:
                    if alias.name != "*" and (alias.asname or alias.name) != name:
                        continue
                    found = _definition(sources, origin, name if alias.name == "*" else alias.name, depth + 1)
                    if found is not None or alias.name != "*":
                        return found or (node if _files(sources, f"{origin}.{alias.name}") else None)
    return None


def _top_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class, also under `if` and `try`; annotated definitions come first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _top_level(node)
        elif isinstance(node, ast.ExceptHandler):
            yield from _top_level(node)


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.FunctionDef):
        return {node.name, *(_globals_set(node) if node.name == "__getattr__" else ())}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _globals_set(node: ast.FunctionDef) -> set[str]:
    """Returns the names that a module makes on first access: globals()["name"] = ..."""
    return {
        str(inner.slice.value)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Subscript) and ast.unparse(inner.value) == "globals()"
        if isinstance(inner.ctx, ast.Store) and isinstance(inner.slice, ast.Constant)
    }


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _member(node: ast.AST, name: str) -> ast.AST | None:
    """Finds a name that a class's body binds or a method sets on self."""
    if not isinstance(node, ast.ClassDef):
        return None
    for statement in _top_level(node):
        if name in _bound(statement):
            return statement
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store):
            return inner
    return None


def _missing_parameters(node: ast.AST, wanted: Iterable[str]) -> list[str]:
    if isinstance(node, ast.ClassDef):
        node = _member(node, "__init__") or node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg is not None:
        return []
    taken = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    return [name for name in wanted if name not in taken]


def names_taken(tree: ast.Module, own: Collection[str] = ()) -> set[str]:
    """Returns the names that a file takes from libraries: dotted names of vLLM and DeepSpeed, private names of others.

    An attribute that begins with an underscore, of something that is not `self`, is given as "*._name", unless it is
    one of the product's `own`.
    """
    imported = dict(_imports(tree))
    taken = {name for name in imported.values() if _is_listed(name)}
    known = {*own, *_PUBLIC}
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain[0] in imported:
                taken |= {name} if _is_listed(name := ".".join((imported[chain[0]], *chain[1:]))) else set()
            elif _is_private(node.attr) and chain[:-1] not in _OURSELVES and node.attr not in known:
                taken.add(f"*.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"(vllm|deepspeed)(\.\w+)+", node.value):
                taken.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_STRING:
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and _is_private(attribute.value) and attribute.value not in known:
                taken.add(f"*.{attribute.value}")
    return {name for name in taken if not any(other.startswith(f"{name}.") for other in taken)}


def own_names(tree: ast.Module) -> set[str]:
    """Returns the names that a file defines or sets on self."""
    found = set()
    for node in _nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _chain(node)[:-1] == ("self",):
            found.add(node.attr)
    return found


def _chain(node: ast.AST) -> tuple[str, ...]:
    """Returns ("a", "b", "c") for a.b.c; calls and subscripts have an empty name."""
    if isinstance(node, ast.Attribute):
        return (*_chain(node.value), node.attr)
    return (node.id if isinstance(node, ast.Name) else "",)


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields each imported name of the file with its dotted name."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_listed(dotted: str) -> bool:
    library, *parts = dotted.split(".")
    return library in ("vllm", "deepspeed") or (library in _FOREIGN and any(map(_is_private, parts)))


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")
