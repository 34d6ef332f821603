"""Compare the chat templates of our tests with originals, as TRL's wheel, llama.cpp and transformers carry them.

    pip download --no-deps trl==1.16.0 && unzip trl-*.whl 'trl/chat_templates/*'
    python benchmarks/original_templates.py trl/chat_templates LLAMA_CPP/models/templates

LLAMA_CPP is a checkout of llama.cpp; Phi-4's is in its tests, and Llama 4's in the installed transformers. Prints a
line for each family whose row in docs/chat_templates.md, trained replies or growth by tokens differ. Ends with exit
code 1 if there is one.
"""

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORIGINALS = {
    "Qwen2.5": "qwen2_5", "Qwen2.5 base": "qwen2_5", "Qwen3": "qwen3", "Qwen3, enable_thinking: false": "qwen3",
    "Qwen3.5": "qwen3_5_think", "R1 distillations": "deepseek_r1_distill", "Llama 3": "llama3_1", "Gemma 2": "gemma",
    "Gemma 3": "gemma3", "GLM-4.5": "glm4moe", "gpt-oss": "gptoss",
    "QwQ": "Qwen-QwQ-32B", "Mistral": "mistralai-Mistral-Nemo-Instruct-2407", "SmolLM3": "HuggingFaceTB-SmolLM3-3B",
    "SmolLM3, enable_thinking: false": "HuggingFaceTB-SmolLM3-3B", "Granite": "ibm-granite-granite-3.3-2B-Instruct",
    "Phi-4": "", "Llama 4": "",
}  # fmt: skip
_PHI4 = re.compile(r'"phi-4",\s*/\* \.template_str= \*/ ("(?:[^"\\]|\\.)*")')


def original(name: str, folders: list[Path]) -> str | None:
    """Returns the text of a family's original; None if no folder has it."""
    if name == "Llama 4":
        spec = importlib.util.find_spec("transformers")
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).with_name("models") / "llama4/processing_llama4.py"
        return next((text for target, text in _constants(source) if target == "chat_template"), None)
    places = [folder.parents[1] / "tests/test-chat-template.cpp" for folder in folders]
    if name == "Phi-4":
        found = [_PHI4.search(place.read_text()) for place in places if place.is_file()]
        return next((str(ast.literal_eval(one[1])) for one in found if one), None)
    files = [folder / f"{ORIGINALS[name]}.jinja" for folder in folders]
    return next((file.read_text() for file in files if file.is_file()), None)


def _constants(source: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(source.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            yield node.targets[0].id, str(node.value.value)


def differences(folders: list[Path]) -> Iterator[str]:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "lib/data/tests")]
    import test_chat_templates as checks

    from support.fakes.models.chat_templates import FAMILIES

    for family in FAMILIES:
        if (text := original(family.name, folders)) is None:
            yield f"{family.name}: no folder has its original"
            continue
        theirs = replace(family, template=text)
        try:
            if (row := checks.row(theirs)) != checks.row(family):
                yield f"{family.name}: its original gives {row}"
            for reply in ("4", checks.THOUGHT, "A.\n</think>\n\n4"):
                checks.test_a_trained_reply_follows_the_prompt_of_rollouts_and_ends_once(theirs, reply)
            checks.test_a_conversation_that_is_not_rewritten_grows_by_tokens(theirs)
        except Exception as error:  # also of templates that do not render
            yield f"{family.name}: {type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    found = list(differences([folder.absolute() for folder in parser.parse_args().folders]))
    print("\n".join(found) or f"{len(ORIGINALS)} rows are those of the originals")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
