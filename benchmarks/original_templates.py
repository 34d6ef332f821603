"""Compare the chat templates of our tests with originals, as TRL's wheel carries them.

    pip download --no-deps trl==1.16.0 && unzip trl-*.whl 'trl/chat_templates/*'
    python benchmarks/original_templates.py trl/chat_templates

Prints a line for each family whose row in docs/chat_templates.md, trained replies or growth by tokens differ. Ends with
exit code 1 if there is one.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORIGINALS = {
    "Qwen2.5": "qwen2_5", "Qwen2.5 base": "qwen2_5", "Qwen3": "qwen3", "Qwen3, enable_thinking: false": "qwen3",
    "Qwen3.5": "qwen3_5_think", "R1 distillations": "deepseek_r1_distill", "Llama 3": "llama3_1", "Gemma 2": "gemma",
    "Gemma 3": "gemma3", "GLM-4.5": "glm4moe", "gpt-oss": "gptoss",
}  # fmt: skip


def differences(folder: Path) -> Iterator[str]:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "lib/data/tests")]
    import test_chat_templates as checks

    from support.fakes.models.chat_templates import FAMILIES

    for family in FAMILIES:
        if family.name not in ORIGINALS:
            continue
        original = replace(family, template=(folder / f"{ORIGINALS[family.name]}.jinja").read_text())
        if (theirs := checks.row(original)) != checks.row(family):
            yield f"{family.name}: its original gives {theirs}"
        try:
            for reply in ("4", checks.THOUGHT, "A.\n</think>\n\n4"):
                checks.test_a_trained_reply_follows_the_prompt_of_rollouts_and_ends_once(original, reply)
            checks.test_a_conversation_that_is_not_rewritten_grows_by_tokens(original)
        except AssertionError as error:
            yield f"{family.name}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    found = list(differences(parser.parse_args().folder))
    print("\n".join(found) or f"{len(ORIGINALS)} rows are those of the originals")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
