"""Writes the YAML of a run on a user's model and data. The algorithm follows from the columns of the rows.

`trinity init` writes it into the current folder, `trinity run --model M --data D` into the job folder.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity.commands.request import OwnYaml
from trinity.config import parse
from trinity.data.datasets import SHAREGPT, conversation_in, read
from trinity.data.tables import DatasetError, Row, column_value
from trinity.data.vision import why_no_images
from trinity.reading.errors import RunError
from trinity.reading.job import is_job, make_folder, make_private
from trinity.runtime import files
from trinity.runtime.devices import detect_gpus

FILE = "run.yaml"  # in the job folder
ROOT = "${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}"
ALGORITHMS = ("grpo", "sft", "dpo")
# Columns of well-known datasets, the likeliest first, in any case of letters.
PROMPTS = ("question", "prompt", "problem", "instruction", "input", "query", "messages")
ANSWERS = (
    "answer", "response", "solution", "output", "target", "label", "completion", "reference", "ground_truth",
    "final_answer", "reward_model.ground_truth",
)  # fmt: skip
_WORKED = ("solution", "response", "output", "completion")  # SFT prefers these to a short answer
CONVERSATIONS = ("messages", "conversations", "conversation")
IMAGES = ("images", "image")
SYSTEMS = ("system", "system_prompt")
_TEXTS = ("text", "content")
_OPTIONS = ("choices", "options")  # of questions of multiple choice
_TEST_SPLITS = ("test", "validation")
_LONGEST_ANSWER, _MOST_WORDS = 60, 4
_SHORT_SHARE = 0.9

_HEAD = """\
# {what}. Run it, or continue it: trinity run {place}
project: {project}
{group}name: {name}
checkpoint_root_dir: {root} # checkpoints and logs; trinity status, view and ui read them
{mode}model:
  model_path: {model} # a folder or a hub name
  max_prompt_tokens: {max_prompt_tokens} # the longest prompt; check --deep measures the data
  max_response_tokens: {max_response_tokens} # longer answers are cut
{cluster}"""
_CLUSTER = """\
cluster:
  node_num: 1
  gpu_per_node: {gpus} # engine and trainer divide them; they share one
"""
_GRPO = """\
algorithm:
  algorithm_type: grpo
  repeat_times: 8 # answers to each prompt; their rewards are compared with each other
  optimizer:
    lr: 1e-6 # small models take 1e-5 and more
buffer:
  batch_size: {batch_size} # prompts of a step
  total_epochs: 1 # passes over the data
  explorer_input:
    taskset:
      name: {taskset}
      path: {data}
{subset}      format: # the columns of prompt and right answer
{columns}      data_selector: {{selector_type: shuffle}}
      default_workflow_type: simple_workflow # one prompt, one answer; see docs/workflows.md
      default_reward_fn_type: accuracy_reward # 1 if the answer is right; see docs/plugins.md for your own
{tests}synchronizer:
  sync_interval: 1 # explorers load new weights after each step
  sync_offset: 1 # and may be one step ahead of the trainer
"""
_TESTS = """\
    eval_tasksets:
      - name: {taskset}
        path: {data}
{subset}        split: {split}
        format:
{columns}        rollout_args: {{temperature: 0.0}}
        default_workflow_type: simple_workflow
        default_reward_fn_type: accuracy_reward
"""
_OFFLINE = """\
algorithm:
  algorithm_type: {algorithm}
  optimizer:
    lr: {lr} # small models take 1e-4 and more
buffer:
  train_batch_size: {batch_size} # rows of a step
  total_epochs: 1 # passes over the data
  trainer_input:
    experience_buffer:
      name: {taskset}
      storage_type: file
      path: {data}
{subset}      format:
{columns}      data_selector:
        selector_type: shuffle
"""
_TAIL = """\
trainer:
  save_interval: 50 # steps between checkpoints
"""


@dataclass(frozen=True)
class Form:
    """The algorithm for rows, `format` of the YAML, and the reason for a person."""

    algorithm: str
    columns: dict[str, str]
    why: str
    left_out: str = ""  # what the data has and the run does not read, and why

    def __str__(self) -> str:
        named = ", ".join(f"{key.removesuffix('_key').replace('_', ' ')} {name!r}" for key, name in self.columns.items()
                          if key.endswith("_key"))  # fmt: skip
        return f"{self.algorithm} ({self.why}); columns: {named}" + (f"; {self.left_out}" if self.left_out else "")


@dataclass(frozen=True)
class Lengths:
    prompt: int = 1024
    response: int = 512


def read_rows(data: str, subset: str = "") -> Sequence[Row]:
    """Raises RunError for data that cannot be read."""
    try:
        return read(data, subset=subset or None)
    except DatasetError as error:
        raise RunError(f"--data {error}", 2) from None


def algorithm_of(rows: Sequence[Row], prompt: str = "", answer: str = "") -> tuple[str, str]:
    """Returns the algorithm that fits the columns, and why. Raises RunError if none does."""
    first = rows[0]
    if not answer and _has_pair(first):
        return "dpo", "each row has a chosen and a rejected reply"
    asked, answer = known(PROMPTS, first), answer or known(ANSWERS, first)
    if (talk := conversation(first)) and not prompt and (not answer or asked == talk):
        return "sft", "each row is a conversation that ends with the assistant's reply"
    if not answer:
        raise _unnamed("--answer", "right answers", first)
    values = [value for row in rows if (value := column_value(row, answer)[1]) is not None]
    if sum(map(_is_short, values)) < _SHORT_SHARE * len(values):
        return "sft", f"most answers in {answer!r} are prose or messages, which accuracy_reward cannot compare"
    return "grpo", "accuracy_reward compares each reply with the row's answer"


def form_of(algorithm: str, why: str, row: Row, prompt: str, answer: str, model: str) -> Form:
    """Returns the form of rows for an algorithm. `prompt`, `answer`: columns, empty where the algorithm needs none."""
    columns: dict[str, str] = {}
    talk, system = algorithm == "sft" and not answer, known(SYSTEMS, row)
    if talk:
        columns["messages_key"] = conversation(row)
    elif algorithm == "sft":
        columns["prompt_type"] = "plaintext"
    if prompt:
        columns["prompt_key"] = prompt
    if system and (prompt or talk or algorithm == "dpo"):
        columns["system_prompt_key"] = system
    if talk:
        return Form(algorithm, columns, why)
    if algorithm == "dpo":
        columns |= {"chosen_key": known(["chosen"], row), "rejected_key": known(["rejected"], row)}
    else:
        columns["response_key"] = answer
    images, left_out = known(IMAGES, row) if algorithm == "grpo" else "", ""
    if images and (reason := why_no_images(model)) is not None:
        left_out = f"{images}: left out: {reason}"
    elif images:
        columns["image_key"] = images
    return Form(algorithm, columns, why, left_out)


def guessed_form(rows: Sequence[Row], model: str, prompt: str = "", answer: str = "", algorithm: str = "") -> Form:
    """Returns the form that the columns' names and values suggest. Raises RunError with what must be given."""
    first = rows[0]
    for option, name in (("--prompt", prompt), ("--answer", answer)):
        if name and (problem := column_problem(name, first)):
            raise RunError(f"{option} {name}: {problem}", 2)
    if algorithm and algorithm not in ALGORITHMS:
        raise RunError(f"--algorithm {algorithm}: is unknown here; {', '.join(ALGORITHMS)}; a YAML takes others", 2)
    answers = answers_for(algorithm)
    algorithm, why = (algorithm, "--algorithm") if algorithm else algorithm_of(rows, prompt, answer)
    if algorithm == "dpo" and not _has_pair(first):
        raise RunError(f"--algorithm dpo: needs the columns chosen and rejected; the data has {', '.join(first)}", 2)
    if algorithm == "dpo":
        if not prompt:
            prompt = known([*PROMPTS, *CONVERSATIONS], first)
            check_whole(rows, prompt)
            if not prompt and isinstance(first[known(["chosen"], first)], str):
                raise _unnamed("--prompt", "prompts", first, algorithm)
        return form_of(algorithm, why, first, prompt, "", model)
    if algorithm == "sft" and not prompt and not answer and conversation(first):
        return form_of(algorithm, why, first, "", "", model)
    if not answer:
        answer = known([name for name in answers if name != prompt.lower()], first)
        _check_unrated(first, answer)
    if not prompt:
        prompt = known([name for name in PROMPTS if name != answer.lower()], first)
        check_whole(rows, prompt)
    for option, what, found in (("--prompt", "prompts", prompt), ("--answer", "right answers", answer)):
        if not found:
            raise _unnamed(option, what, first, algorithm)
    return form_of(algorithm, why, first, prompt, answer, model)


def _unnamed(option: str, what: str, row: Row, algorithm: str = "") -> RunError:
    said = f"{option}: no column of {', '.join(row)} has a well-known name for {what}; give {option}"
    if option == "--answer" and algorithm != "sft":
        said += "; rows without answers need a reward function of your own: write a YAML (docs/plugins.md)"
    if talk := known(CONVERSATIONS, row):
        said += f"; {talk!r} does not end with a message of the assistant, which SFT would learn"
    if text := known(_TEXTS, row):
        said += f"; to train on {text!r} itself, write a YAML of algorithm_type cpt (docs/algorithms.md)"
    return RunError(said, 2)


def check_whole(rows: Sequence[Row], prompt: str) -> None:
    """Raises RunError if the guessed column is only a part of the prompts: alpaca's input, options to choose from."""
    others = [name for name in rows[0] if name.lower() in _OPTIONS]
    given = known(["input"], rows[0]) if prompt.lower() == "instruction" else ""
    if given and any(row.get(given) for row in rows):
        others.append(given)
    if prompt and others:
        what = f"{prompt} and {', '.join(others)} belong together"
        raise RunError(f"--prompt: {what}; write both into one column and name it with --prompt", 2)


def _check_unrated(row: Row, answer: str) -> None:
    """Raises RunError if the answer is a reply that a label calls good or bad, as KTO's rows have it, or that label."""
    label, reply = known(["label"], row), known(_WORKED, row)
    if reply and answer in (label, reply) and isinstance(row.get(label), bool):
        what = f"{label!r} rates the reply in {reply!r} (KTO), which no algorithm reads"
        fix = f"keep the rows with true and give --answer {reply}, or write pairs of a chosen and a rejected reply"
        raise RunError(f"--answer: {what}; {fix}", 2)


def text_of(
    model: str, data: str, rows: Sequence[Row], form: Form, *, place: str, name: str, gpus: int, root: str = ROOT,
    project: str = "trinity", group: str = "", lengths: Lengths | None = None,
    subset: str = "",
) -> str:  # fmt: skip
    """Returns the commented YAML. `place`: its file, as the comment names it."""
    lengths = lengths or Lengths()
    grpo = form.algorithm == "grpo"
    values: dict[str, Any] = {
        "what": f"{form.algorithm.upper()} on {data}".replace("\n", " "),
        "place": place,
        "project": quoted(project),
        "group": f"group: {quoted(group)}\n" if group else "",
        "name": quoted(name),
        "root": root if root == ROOT else quoted(root),
        "mode": "" if grpo else "mode: train\n",
        "model": quoted(model),
        "max_prompt_tokens": lengths.prompt,
        "max_response_tokens": lengths.response,
        "cluster": _CLUSTER.format(gpus=gpus) if gpus else "",
        "batch_size": min(32, len(rows)),
        "algorithm": form.algorithm,
        "lr": "1e-5" if form.algorithm == "sft" else "1e-6",
        "taskset": quoted(Path(data).stem or "data"),
        "data": quoted(data),
        "columns": _lines(form.columns, 8),
        "subset": _lines({"subset_name": subset}, 6) if subset else "",
    }
    split, left_out = _test_split(data, subset, form) if grpo else ("", "")
    tests = {**values, "columns": _lines(form.columns, 10), "split": split,
             "subset": _lines({"subset_name": subset}, 8) if subset else "",
             "taskset": quoted(f"{Path(data).stem or 'data'}-{split}")}  # fmt: skip
    values["tests"] = _TESTS.format(**tests) if split else left_out
    return (_HEAD + (_GRPO if grpo else _OFFLINE) + _TAIL).format(**values)


def own_yaml(model: str, data: str, subset: str, prompt: str, answer: str, algorithm: str) -> OwnYaml:
    """Returns the maker of the YAML of --model and --data. Raises RunError if one of them is missing."""
    given = {"--model": model, "--data": data, "--subset": subset, "--prompt": prompt, "--answer": answer,
             "--algorithm": algorithm}  # fmt: skip
    if missing := [option for option in ("--model", "--data") if not given[option]]:
        one = next(option for option, value in given.items() if value)
        raise RunError(f"{one} needs {' and '.join(missing)} too; a YAML names model, data and columns itself", 2)
    return lambda overrides: yaml_of(model, data, overrides, subset, prompt, answer, algorithm)


def yaml_of(
    model: str, data: str, overrides: Sequence[str], subset: str, prompt: str, answer: str, algorithm: str
) -> tuple[Path, str]:
    """Returns file and text of the YAML, and prints what was chosen. Overrides may move the job folder."""
    rows = read_rows(data, subset)
    form = guessed_form(rows, model, prompt, answer, algorithm)
    given = data
    model, data = (str(Path(one).expanduser().absolute()) if Path(one).expanduser().exists() else one
                   for one in (model, data))  # fmt: skip
    name = re.sub(r"[^\w.-]+", "-", f"{Path(data).stem}-{Path(model).name}").strip(".-")[:100] or "run"
    gpus = len(detect_gpus())
    text = text_of(model, data, rows, form, place=FILE, name=name, gpus=gpus, subset=subset)
    config = parse(text, "--model and --data", overrides, plugins_loaded=False)
    file = make_folder(config) / FILE
    root = str(Path(config.checkpoint_root_dir).expanduser().absolute())
    text = text_of(model, data, rows, form, place=str(file), name=config.name, gpus=gpus, root=root,
                   project=config.project, group=config.group, subset=subset)  # fmt: skip
    print(f"{given}: {len(rows)} row(s); {form}", file=sys.stderr)
    return file, text


def write_own(file: Path, text: str) -> None:
    """Writes the YAML into its job folder.

    Raises RunError if a run with another YAML has begun there, or if the file was changed by hand.
    """
    made = file.with_name(f".{file.name}")  # what was written last
    if file.exists() and file.read_text() == text:
        print(f"YAML of the run: {file}", flush=True)
        return
    if is_job(file.parent):
        what = f"a run in {file.parent} has begun with another YAML than --model and --data give"
        fix = f"continue it by `trinity run {file}`, or give the new run another name=..."
        raise RunError(f"{what}; {fix}", 2)
    if file.exists() and made.exists() and made.read_text() != file.read_text():
        raise RunError(f"{file} was changed by hand; run it by `trinity run {file}`, or remove it", 2)
    make_private(file.parent)
    files.write_atomic(made, text.encode())
    files.write_atomic(file, text.encode())
    print(f"YAML of the run, with comments: {file}", flush=True)


def needs_columns(row: Row, algorithm: str) -> bool:
    """Returns True if a row has columns of prompts and answers, neither pairs of replies nor a conversation."""
    if algorithm == "dpo" or (not algorithm and _has_pair(row)):
        return False
    return algorithm == "grpo" or not conversation(row) or (not algorithm and bool(known(ANSWERS, row)))


def column_problem(name: str, row: Row) -> str:
    """Returns why a column cannot be taken; empty if the row has it."""
    return "" if _has(row, name) else f"is no column of the data, which has {', '.join(row)}"


def known(names: Sequence[str], row: Row) -> str:
    """Returns the row's column of the first well-known name that it has, in any case of letters; empty without one."""
    columns = {column.lower(): column for column in row}
    return next((columns.get(name, name) for name in names if name in columns or _has(row, name)), "")


def answers_for(algorithm: str) -> tuple[str, ...]:
    """Returns well-known names of answers, the likeliest first."""
    return (*_WORKED, *ANSWERS) if algorithm == "sft" else ANSWERS


def conversation(row: Row) -> str:
    """Returns the column of a conversation that ends with the assistant's message; empty without one."""

    def ends_with_assistant(value: Any) -> bool:
        last = value[-1] if isinstance(value, list) and value else None
        return isinstance(last, dict) and "assistant" in (last.get("role"), SHAREGPT.get(str(last.get("from"))))

    talks = (name for name in row if name.lower() in CONVERSATIONS and ends_with_assistant(conversation_in(row, name)))
    return next(talks, "")


def quoted(text: str) -> str:
    """A YAML scalar: JSON's strings are YAML's. ${...} stays text."""
    return json.dumps(text.replace("${", "\\${"), ensure_ascii=False)


def _has(row: Row, name: str) -> bool:
    return column_value(row, name)[0]


def _has_pair(row: Row) -> bool:
    return bool(known(["chosen"], row) and known(["rejected"], row))


def _is_short(value: Any) -> bool:
    """Returns True for an answer that a reply can be compared with: marked, or a few words, or a number or formula."""
    if isinstance(value, list):
        return bool(value) and not any(isinstance(one, dict) for one in value) and all(map(_is_short, value))
    text = str(value).strip()
    if any(mark in text for mark in ("####", "\\boxed", "<answer>")):
        return True
    is_formula = re.search(r"[\d\\$=]", text) is not None
    return 0 < len(text) <= _LONGEST_ANSWER and "\n" not in text and (is_formula or len(text.split()) <= _MOST_WORDS)


def _test_split(data: str, subset: str, form: Form) -> tuple[str, str]:
    """Returns the split that evaluations use and no comment, or no split and a comment on those that cannot be used."""
    if Path(data).expanduser().is_file():
        return "", ""
    needed, left_out = [form.columns[key] for key in ("prompt_key", "response_key")], ""
    for split in _TEST_SPLITS:
        try:
            rows = read(data, split, subset or None)
        except DatasetError:
            continue
        empty = (name for name in needed if any(column_value(row, name)[1] in (None, "") for row in rows))
        if (name := next(empty, None)) is None:
            return split, ""
        left_out += f"    # not evaluated: the split {split}, as not every row has {quoted(name)}\n"
    return "", left_out


def _lines(columns: dict[str, str], indent: int) -> str:
    return "".join(f"{' ' * indent}{key}: {quoted(name)}\n" for key, name in columns.items())
