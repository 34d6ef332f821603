"""`trinity init`: the YAML of the commonest runs on one's own model and data, and its check."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trinity.cli.commands.check import check
from trinity.cli.supervise.checks.preflight import check_model_folder
from trinity.commands import (
    AlgorithmOption,
    AnswerOption,
    DataOption,
    ModelOption,
    PromptOption,
    SubsetOption,
    command,
    group,
)
from trinity.own_data import yaml as own_data
from trinity.reading.errors import RunError, ending_well
from trinity.reading.render import clipped, visible
from trinity.runtime import files
from trinity.runtime.devices import detect_gpus

app = group()

_SHOWN_CHARACTERS = 200


@command(app, "init")
def init(
    model: ModelOption = "",
    data: DataOption = "",
    subset: SubsetOption = "",
    prompt: PromptOption = "",
    answer: AnswerOption = "",
    algorithm: AlgorithmOption = "",
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs to use; else all; 0: the CPU")] = None,
    max_prompt_tokens: Annotated[int, typer.Option("--max-prompt-tokens", min=1)] = 1024,
    max_response_tokens: Annotated[int, typer.Option("--max-response-tokens", min=1)] = 512,
    output: Annotated[Path, typer.Option("--output", "-o", help="The YAML to write")] = Path("run.yaml"),
) -> int:
    """Write the YAML of a run on your own model and data, and check it. Asks for what no option gives."""
    if output.exists():
        raise RunError(f"{output} exists; give --output another name, or remove it", 2)
    if not output.absolute().parent.is_dir():
        raise RunError(f"--output {output}: there is no folder {output.parent}", 2)
    if model and (why := _model_problem(model)):
        raise RunError(f"--model {why}", 2)
    try:
        model = model or _ask("--model", "Model (a folder or a hub name)", _model_problem)
        data = data or _ask("--data", "Data (a file, its folder, or a hub name)", lambda d: _data_problem(d, subset))
        rows = own_data.read_rows(data, subset)
        first = rows[0]
        print(f"{data}: {len(rows)} row(s); the first:")
        for name, value in first.items():
            print(
                f"  {visible(name)}: {clipped(json.dumps(value, ensure_ascii=False, default=str), _SHOWN_CHARACTERS)}"
            )
        if sys.stdin.isatty() and own_data.needs_columns(first, algorithm):
            if not prompt:
                prompt = _ask_column("--prompt", "Column of the prompts", own_data.PROMPTS, first)
                if prompt == own_data.known(own_data.PROMPTS, first):
                    own_data.check_whole(rows, prompt)
            rest = [name for name in own_data.answers_for(algorithm) if name != prompt.lower()]
            answer = answer or _ask_column("--answer", "Column of the right answers", rest, first)
        form = own_data.guessed_form(rows, model, prompt, answer, algorithm)
        found = len(detect_gpus())
        if gpus is None and found and sys.stdin.isatty():
            gpus = int(_ask("--gpus", f"GPUs to use, of {found}", lambda text: _gpus_problem(text, found), str(found)))
    except (KeyboardInterrupt, EOFError):
        print()  # behind the question
        raise RunError(f"ended before {output} was written", 130) from None
    lengths = own_data.Lengths(max_prompt_tokens, max_response_tokens)
    gpus = found if gpus is None else gpus
    text = own_data.text_of(model, data, rows, form, place=str(output), name=output.stem, gpus=gpus,
                            lengths=lengths, subset=subset)  # fmt: skip
    files.write_atomic(output, text.encode())
    print(f"chosen by the columns: {form}" if not algorithm else f"chosen: {form}")
    print(f"{output} is written; trinity check --deep {output}:", flush=True)
    code = ending_well(lambda: check(config=output, deep=True))
    if code == 0:
        print(f"next: {'CUDA_VISIBLE_DEVICES= ' if found and not gpus else ''}trinity run {output}")
    else:
        print(f"{output} stays: change it and check it again, or remove it for another trinity init", file=sys.stderr)
    return code


def _ask(option: str, question: str, problem: Callable[[str], str], default: str = "") -> str:
    """Asks the person at the terminal until the answer has no problem. Raises RunError without a terminal."""
    if not sys.stdin.isatty():
        raise RunError(f"{option} is missing, and there is no terminal to ask at; give {option}", 2)
    while True:
        given = input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
        if not (why := problem(given) if given else "an answer is needed; Ctrl-C ends"):
            return given
        print(f"  {visible(why)}")


def _ask_column(option: str, question: str, known: list[str] | tuple[str, ...], row: own_data.Row) -> str:
    return _ask(option, question, lambda name: _said(name, own_data.column_problem(name, row)),
                own_data.known(known, row))  # fmt: skip


def _model_problem(path: str) -> str:
    return "; ".join(problem.message for problem in check_model_folder("--model", path))


def _data_problem(path: str, subset: str) -> str:
    try:
        own_data.read_rows(path, subset)
    except RunError as error:
        return str(error).removeprefix("--data ")
    return ""


def _gpus_problem(text: str, found: int) -> str:
    if text.isdecimal() and int(text) <= found:
        return ""
    return f"{text!r} is no number from 0 to {found}; 0 is the CPU"


def _said(name: str, problem: str) -> str:
    return f"{name!r} {problem}" if problem else ""
