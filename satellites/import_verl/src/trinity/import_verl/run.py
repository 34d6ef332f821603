"""The options of one veRL call, while they are turned into a YAML: the options used, and the notes."""

import re
from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path

from trinity.import_verl.expand import default_of
from trinity.import_verl.script import Call
from trinity.import_verl.tables import ESTIMATORS, NAME, NULL_COUNTS, PROJECT
from trinity.import_verl.values import Leaf, Node, is_null, is_true, node_of, text_leaf, text_of, texts_of

_OWN_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)+)\}")
_TRUTH = "reward_model.ground_truth"
_FILE = re.compile(r"(?:(?P<folder>.*)/)?(?P<stem>[^/{}]+?)\.(?:parquet|jsonl?|csv|arrow)(?:\.gz|\.zst)?", re.S)


class Run:
    """Rules take options; `left` yields the options that no rule took.

    `unmapped`, `unneeded` and `notes` are lines for people; `not_needed` has the rules' reasons for options that they
    did not take (a name that ends in `.` stands for a section).
    """

    def __init__(self, call: Call) -> None:
        self.unmapped = [f"{flag}: only a running shell and veRL can know what it sets" for flag in call.flags]
        self.unneeded = [f"~{key}: taken out of veRL's settings" for key in call.removed]
        self.unmapped += [
            f"{option.key}: line {option.line} uses {option.unknown}, which only a running shell can know"
            for option in call.options.values()
            if option.unknown
        ]
        self.notes = list(call.notes)
        self.not_needed: dict[str, str] = {}
        known = {key: option.value for key, option in call.options.items() if not option.unknown}
        for key in [key for key, value in known.items() if is_null(value) and key not in NULL_COUNTS]:
            self.unneeded.append(f"{key}={known.pop(key)}: asks for nothing")
        named = {"trainer.project_name": PROJECT, "trainer.experiment_name": NAME, **known}
        self._values = {key: _OWN_REFERENCE.sub(lambda m: named.get(m[1], m[0]), value) for key, value in known.items()}
        for key, value in self._values.items():
            if found := _OWN_REFERENCE.search(value):
                self.notes.append(f"{key} refers to {found[1]}, which the script does not set; write it out")
        self._taken: set[str] = set()

    @property
    def advantage(self) -> str:
        estimator = self._values.get("algorithm.adv_estimator", "gae")
        return ESTIMATORS.get(text_of(estimator), estimator)

    def take(self, option: str) -> str | None:
        """The option's value as it was written; None if it was not given."""
        self._taken.add(option)
        return self._values.get(option)

    def left(self) -> Iterator[str]:
        return (option for option in list(self._values) if option not in self._taken)

    def value(self, option: str) -> str:
        return self._values[option]

    def number(self, option: str, default: int, derived: bool = True) -> int | None:
        """A whole number, or None. A reference to the environment counts as its default, which is said if other keys
        are `derived` from it."""
        text = self.take(option)
        if text is None:
            return default
        used = default_of(text.strip())
        number = int(used) if re.fullmatch(r"[+-]?\d{1,18}", used) else None
        note = f"{option}: derived keys are made with {number} of {text}"
        if derived and number is not None and used != text.strip() and note not in self.notes:
            self.notes.append(note)
        return number

    def picked(self, section: str, names: Mapping[str, str]) -> dict[str, Node]:
        """Options of a section that were given, under our names."""
        found: dict[str, Node] = {}
        for theirs, ours in names.items():
            value = self.take(f"{section}.{theirs}")
            if value is not None:
                found[ours] = node_of(value, f"{section}.{theirs}")
        return found

    def named(self, option: str, default: str, names: Mapping[str, str]) -> Leaf:
        """A choice that may be spelt otherwise here. An unknown one is kept, for `trinity check` to refuse."""
        given = self.take(option)
        theirs = text_of(default if given is None else given)
        if theirs not in names:
            self.unmapped.append(f"{option}={theirs}: no counterpart; kept, and `trinity check` will refuse it")
        source = f"{option}, veRL's default {theirs}" if given is None else f"{option}={theirs}"
        return text_leaf(names.get(theirs, theirs), source)

    def tasksets(self, option: str, suffix: str) -> list[dict[str, Node]]:
        """A taskset per file, named after its folder. `<folder>/train.parquet` is the split `train` of `<folder>`."""
        value = self.take(option)
        if value is None:
            key = "eval_tasksets" if suffix else "tasksets"
            self.notes.append(f"{option} is not given; set buffer.explorer_input.{key} yourself")
            return []
        columns = self._columns()
        found: list[dict[str, Node]] = []
        names: set[str] = set()
        for path in texts_of(value):
            file = _FILE.fullmatch(path)
            folder, stem = (file["folder"] or ".", file["stem"]) if file else (path, "")
            last = folder.rstrip("/").rpartition("/")[2]
            name = last if re.fullmatch(r"[\w.-]*\w[\w.-]*", last) else stem or "tasks"
            name = (
                name
                if name not in names
                else f"{name}_{stem}"
                if f"{name}_{stem}" not in names
                else f"{name}_{len(names)}"
            )
            names.add(name)
            taskset: dict[str, Node] = {
                "name": text_leaf(name + suffix),
                "storage_type": Leaf("file"),
                "path": text_leaf(folder, option),
            }
            if file and ("-of-" in stem or self._files_of_split(folder, stem) > 1):  # a split would be more files
                taskset["path"] = text_leaf(path, option)
            elif stem:
                taskset["split"] = text_leaf(stem)
            if "image_key" in columns:
                taskset["default_workflow_type"] = Leaf("simple_mm_workflow", "its prompts have images")
            found.append({**taskset, "format": dict(columns)})
        return found

    @staticmethod
    def _files_of_split(folder: str, stem: str) -> int:
        return sum(1 for mark in ".-" for _ in Path(folder).glob(f"{escape(stem)}{mark}*"))

    def _columns(self) -> dict[str, Node]:
        """The columns of veRL's rows. Each row's data_source chooses its scorer, unless the script names another."""
        prompt, response, image = (self.take(f"data.{name}_key") for name in ("prompt", "response", "image"))
        columns: dict[str, Node] = {
            "prompt_key": node_of(prompt or "prompt", "data.prompt_key" if prompt else ""),
            "response_key": node_of(response or _TRUTH, "data.response_key" if response else "as in veRL's rows"),
        }
        if image:
            columns["image_key"] = node_of(image, "data.image_key")
        source = self.take("data.reward_fn_key") or "data_source"
        if self.own_reward() is None and not is_true(self.take("reward_model.enable") or "False"):
            columns["reward_fn_key"] = node_of(source, "veRL's default scorer of each data_source")
        return columns

    def own_reward(self) -> str | None:
        """The name of the script's own reward function, or None."""
        path = next((key for key in self._values if key.endswith("custom_reward_function.path")), None)
        if path is None:
            return None
        return text_of(self._values.get(path.removesuffix("path") + "name", "compute_score"))

    @staticmethod
    def put(tree: dict[str, Node], path: str, node: Node) -> bool:
        """Set a dotted key; False if something else is in its place."""
        *sections, last = path.split(".")
        for section in sections:
            inside = tree.setdefault(section, {})
            if not isinstance(inside, dict):
                return False
            tree = inside
        if last in tree:
            return False
        tree[last] = node
        return True
