"""`trinity init`: the YAML of the commonest run, GRPO on one's own model and data, and its check."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trinity.cli.commands.check import check
from trinity.commands import command, group
from trinity.data.datasets import read
from trinity.data.tables import DatasetError, Row
from trinity.reading.errors import RunError
from trinity.runtime.devices import detect_gpus

app = group()

# Columns of well-known datasets, the likeliest first.
PROMPTS = ("question", "prompt", "problem", "instruction", "input", "query", "messages")
ANSWERS = ("answer", "response", "solution", "output", "target", "label", "completion", "reference")
_SHOWN_CHARACTERS = 200

TEMPLATE = """\
# GRPO on {data}. Run it, or continue it: trinity run {output}
project: trinity
name: {name}
checkpoint_root_dir: ./checkpoints # checkpoints and logs; trinity status, view and ui read them
model:
  model_path: {model} # a folder or a hub name
  max_prompt_tokens: {max_prompt_tokens} # the longest prompt; check --deep measures the data
  max_response_tokens: {max_response_tokens} # longer answers are cut
{cluster}algorithm:
  algorithm_type: grpo
  repeat_times: 8 # answers to each prompt; their rewards are compared with each other
  optimizer:
    lr: 1e-6 # small models take 1e-5 and more
buffer:
  batch_size: {batch_size} # prompts of a step
  total_epochs: 1 # passes over the data
  explorer_input:
    taskset:
      name: {name}
      path: {data}
      format:
        prompt_key: {prompt} # the columns of prompt and right answer
        response_key: {answer}
      default_workflow_type: simple_workflow # one prompt, one answer; see docs/workflows.md
      default_reward_fn_type: accuracy_reward # 1 if the answer is right; see docs/plugins.md for your own
synchronizer:
  sync_interval: 1 # explorers load new weights after each step
  sync_offset: 1 # and may be one step ahead of the trainer
trainer:
  save_interval: 50 # steps between checkpoints
"""
_CLUSTER = """\
cluster:
  node_num: 1
  gpu_per_node: {gpus} # engine and trainer divide them; they share one
"""


@command(app, "init")
def init(
    model: Annotated[str, typer.Option("--model", help="The model's folder or hub name")] = "",
    data: Annotated[str, typer.Option("--data", help="A file of rows, its folder, or a hub name")] = "",
    prompt: Annotated[str, typer.Option("--prompt", help="The column of prompts; else guessed")] = "",
    answer: Annotated[str, typer.Option("--answer", help="The column of right answers; else guessed")] = "",
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs to use; else all; 0: the CPU")] = None,
    max_prompt_tokens: Annotated[int, typer.Option("--max-prompt-tokens", min=1)] = 1024,
    max_response_tokens: Annotated[int, typer.Option("--max-response-tokens", min=1)] = 512,
    output: Annotated[Path, typer.Option("--output", "-o", help="The YAML to write")] = Path("run.yaml"),
) -> int:
    """Write the YAML of a GRPO run on your own model and data, and check it. Asks for what no option gives."""
    if output.exists():
        raise RunError(f"{output} exists; give --output another name, or remove it", 2)
    model = model or _ask("--model", "Model (a folder or a hub name)")
    data = data or _ask("--data", "Data (a file, its folder, or a hub name)")
    try:
        rows = read(data)
    except DatasetError as error:
        raise RunError(str(error), 2) from None
    first = rows[0]
    print("the first row:")
    for name, value in first.items():
        print(f"  {name}: {json.dumps(value, ensure_ascii=False, default=str)[:_SHOWN_CHARACTERS]}")
    prompt = _column("--prompt", "Column of the prompts", prompt, PROMPTS, first)
    answer = _column("--answer", "Column of the right answers", answer, ANSWERS, first)
    found = len(detect_gpus())
    if gpus is None:
        gpus = int(_ask("--gpus", "GPUs to use", str(found))) if found and sys.stdin.isatty() else found
    text = TEMPLATE.format(
        model=_quoted(model),
        data=_quoted(data),
        prompt=_quoted(prompt),
        answer=_quoted(answer),
        name=_quoted(output.stem),
        output=output,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        batch_size=min(32, len(rows)),
        cluster=_CLUSTER.format(gpus=gpus) if gpus else "",
    )
    output.write_text(text)
    print(f"{output} is written; trinity check --deep {output}:")
    code = check(config=output, deep=True)
    if code == 0:
        print(f"next: trinity run {output}")
    return code


def _ask(option: str, question: str, default: str | None = None) -> str:
    """Returns the answer of the person at the terminal. Raises RunError naming the option without a terminal."""
    if not sys.stdin.isatty():
        raise RunError(f"{option} is missing, and there is no terminal to ask at; give {option}", 2)
    return str(typer.prompt(question, default=default))


def _column(option: str, question: str, given: str, known: tuple[str, ...], row: Row) -> str:
    """Returns a column of the row: the given one, or the first of well-known names, which a person may correct."""
    names = ", ".join(row)
    guess = next((name for name in known if name in row), None)
    if not given:
        if sys.stdin.isatty():
            given = _ask(option, question, guess)
        elif guess is None:
            raise RunError(f"{option}: no column of {names} has a well-known name; give {option}", 2)
        else:
            given = guess
            print(f"{option} {given}: guessed by its name")
    if given not in row:
        raise RunError(f"{option} {given}: is no column of the data, which has {names}", 2)
    return given


def _quoted(text: str) -> str:
    """A YAML scalar: JSON's strings are YAML's."""
    return json.dumps(text, ensure_ascii=False)
