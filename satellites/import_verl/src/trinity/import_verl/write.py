"""Writes the YAML's text for a veRL call, and the lines about options that were not imported."""

from dataclasses import dataclass

from trinity.import_verl.rules import RULES
from trinity.import_verl.run import Run
from trinity.import_verl.script import Call
from trinity.import_verl.tables import LAYOUT, NO_COUNTERPART, NOT_NEEDED, ROLLOUT, Row, reason
from trinity.import_verl.values import Leaf, Node, node_of, text_leaf, texts_of


@dataclass(frozen=True)
class Imported:
    """The run as YAML, and lines of text: options not mapped, options not needed, notes."""

    yaml: str
    unmapped: tuple[str, ...]
    unneeded: tuple[str, ...]
    notes: tuple[str, ...]


def imported(call: Call, source: str) -> Imported:
    """The YAML of a call. `source` is the script's name, for the heading."""
    run = Run(call)
    tree: dict[str, Node] = {}
    for entry in LAYOUT:
        key, node = (entry, RULES[entry](run)) if isinstance(entry, str) else (entry.key, _of_row(entry, run))
        if node is not None and not run.put(tree, key, node) and isinstance(entry, Row):
            run.unmapped.append(f"{entry.option}={run.value(entry.option)}: {key} is set by another option")
    if run.take("actor_rollout_ref.model.path") is None:
        run.notes.append("actor_rollout_ref.model.path is not given; set model.model_path yourself")
    for option in run.left():
        _sort(option, run)
    unmapped, unneeded, notes = (
        tuple(dict.fromkeys(" ".join(line.split()) for line in lines))
        for lines in (run.unmapped, run.unneeded, run.notes)
    )
    sections = (_lines({name: node}, 0) for name, node in tree.items())
    text = _text(list(sections))
    for key in (key for key, given in call.options.items() if given.unknown):
        text = text.replace(f"# {key}, veRL's default", f"# {key} is NOT MAPPED (see above): veRL's default")
    return Imported(_heading(source, unmapped, unneeded, notes) + text, unmapped, unneeded, notes)


def _of_row(row: Row, run: Run) -> Node | None:
    if row.when and run.advantage not in row.when:
        return None
    given = run.take(row.option)
    if row.only:
        return None if given is None and not row.default else run.named(row.option, row.default or "", row.names)
    if given is not None:
        if not row.text:
            spelt = row.names.get(given)
            return node_of(given, row.option) if spelt is None else node_of(spelt, f"{row.option}={given}")
        if len(texts := texts_of(given)) == 1:
            return text_leaf(texts[0], row.option)
        run.unmapped.append(f"{row.option}={given}: must be one text")
    return None if row.default is None else node_of(row.default, f"{row.option}, veRL's default")


def _sort(option: str, run: Run) -> None:
    """An option that no rule used: not needed, or without a counterpart."""
    value = run.value(option)
    line = f"{option}={value}"
    row = next((row for row in LAYOUT if isinstance(row, Row) and row.option == option), None)
    lacking = reason(NO_COUNTERPART, option)
    why = reason(run.not_needed, option) or (reason(NOT_NEEDED, option) if lacking is None else None)
    if why is None and row is not None and row.when:
        why = f"{run.advantage} has no use for it"
    if why is None and option.startswith(f"{ROLLOUT}.val_kwargs."):
        why = "there are no files to evaluate on"
    if why is not None:
        run.unneeded.append(f"{line}: {why}")
    else:
        run.unmapped.append(f"{line}: {lacking or 'no counterpart'}")


def _heading(source: str, unmapped: tuple[str, ...], unneeded: tuple[str, ...], notes: tuple[str, ...]) -> str:
    lines = [f"Made from {source} by `trinity import-verl`."]
    for title, found in (("Not mapped:", unmapped), ("Not needed here:", unneeded), ("Notes:", notes)):
        if found:
            lines += ["", title, *(f"  {line}" for line in found)]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


def _text(sections: list[list[str]]) -> str:
    """Sections with blank lines between them; single keys that follow each other stay together."""
    text = ""
    for index, lines in enumerate(sections):
        apart = index and (len(lines) > 1 or len(sections[index - 1]) > 1)
        text += ("\n" if apart else "") + "\n".join(lines) + "\n"
    return text


def _lines(node: dict[str, Node], indent: int) -> list[str]:
    lines: list[str] = []
    for key, inside in node.items():
        start = f"{' ' * indent}{key}:"
        if isinstance(inside, Leaf):
            lines.append(f"{start} {inside.text}{_comment(inside)}")
        elif isinstance(inside, dict):
            lines += [start, *_lines(inside, indent + 2)] if inside else [f"{start} {{}}"]
        elif all(isinstance(item, Leaf) for item in inside):
            items = [item for item in inside if isinstance(item, Leaf)]
            lines += (
                [f"{start} []"] if not items else [start, *(_item([f"{x.text}{_comment(x)}"], indent) for x in items)]
            )
        else:
            lines.append(start)
            lines += [_item(_item_lines(item), indent) for item in inside]
    return lines


def _item_lines(node: Node) -> list[str]:
    if isinstance(node, dict):
        return _lines(node, 0) or ["{}"]
    if isinstance(node, list):
        return [_item(_item_lines(item), -2) for item in node] or ["[]"]
    return [f"{node.text}{_comment(node)}"]


def _item(lines: list[str], indent: int) -> str:
    space = " " * (indent + 2)
    text = "\n".join(lines).split("\n")
    return "\n".join([f"{space}- {text[0]}", *(f"{space}  {line}" for line in text[1:])])


def _comment(leaf: Leaf) -> str:
    return f"  # {' '.join(leaf.comment.split())}" if leaf.comment else ""
