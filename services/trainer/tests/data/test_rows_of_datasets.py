"""Rows as sequences: conversations, preference pairs, plain text; prompts longer than the model."""

import json
import re
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config import make_plan
from trinity.config.load import parse
from trinity.config.schema.buffer import FormatConfig
from trinity.data.datasets import DatasetError, reader
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.client import RawBatch
from trinity.trainer.data.examples import experts_of, from_examples
from trinity.trainer.engine.step import StepTrainer

pytestmark = pytest.mark.core

ENTRY = pb.LedgerEntry(step=2)
ASKED = "<|user|>1+1<|end|><|assistant|>"


@pytest.fixture(scope="module")
def tokenizer(repository: Path) -> Any:
    sys.path.insert(0, str(repository / "examples/quickstart"))
    from make_model import make_tokenizer

    return make_tokenizer()


def example(kind: str, row: dict[str, Any], **form: str) -> pb.Example:
    """As the buffer makes it."""
    return pb.Example(row=7, **reader(kind, FormatConfig(**form), row)(row, 7))  # type: ignore[arg-type]


def texts(tokenizer: Any, sequence: Any) -> tuple[str, str]:
    ids = sequence.token_ids.tolist()
    return tokenizer.decode(ids[: sequence.prompt_length]), tokenizer.decode(ids[sequence.prompt_length :])


def test_a_pair_is_two_replies_to_one_prompt(tokenizer: Any) -> None:
    pair = example("pairs", {"prompt": "1+1", "chosen": "2", "rejected": "3"})
    batch = from_examples(ENTRY, [pair, pair], tokenizer, 64)
    assert [sequence.pair for sequence in batch.sequences] == [1, -1, 2, -2]
    assert [sequence.group for sequence in batch.sequences] == [0, 0, 1, 1]
    assert batch.totals.pairs == 2
    chosen, rejected = (texts(tokenizer, sequence) for sequence in batch.sequences[:2])
    assert chosen == ("<|user|>1+1<|end|><|assistant|>", "2<|end|>")
    assert rejected == (chosen[0], "3<|end|>")


def test_a_pair_may_be_two_whole_conversations(tokenizer: Any) -> None:
    asked = {"role": "user", "content": "1+1"}
    row = {name: [asked, {"role": "assistant", "content": said}] for name, said in (("chosen", "2"), ("rejected", "3"))}
    found = from_examples(ENTRY, [example("pairs", row)], tokenizer, 64).sequences
    assert [texts(tokenizer, s)[1] for s in found] == ["2<|end|>", "3<|end|>"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1", "chosen": "2"}, "row 7: 'rejected' is None"),
        ({"prompt": "1+1", "chosen": "2", "rejected": [{"role": "user", "content": "x"}]}, "row 7: 'rejected' is"),
        ({"chosen": "2", "rejected": "3"}, "row 7: 'prompt' is None"),
    ],
)
def test_a_pair_without_its_parts_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        example("pairs", row)


def test_of_plain_text_every_token_but_the_first_is_learnt(tokenizer: Any) -> None:
    (sequence,) = from_examples(ENTRY, [example("text", {"text": "abc"})], tokenizer, 64).sequences
    assert texts(tokenizer, sequence) == ("a", "bc<|end|>")
    assert sequence.mask.all()
    with pytest.raises(DatasetError, match="row 7: 'text' is ''"):
        example("text", {"text": ""})
    with pytest.raises(DatasetError, match=r"no text in 'prompt'; they have x. Set format.prompt_key"):
        example("text", {"x": 1})


TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), "", None])
@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_tools_of_a_row_are_written_into_its_prompt(tokenizer: Any, tools: Any, kind: str) -> None:
    shows = deepcopy(tokenizer)
    shows.chat_template = "{% if tools %}{{ tools[0].function.name }}|{% endif %}" + tokenizer.chat_template
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    row = {"messages": talk, "chosen": talk, "rejected": talk, "tools": tools}
    for sequence in from_examples(ENTRY, [example(kind, row)], shows, 64).sequences:
        assert texts(shows, sequence) == (f"add|{ASKED}" if tools else ASKED, "2<|end|>")


@pytest.mark.parametrize(("tools", "said"), [("[", "'tools' is no JSON"), (["add"], "'tools' is ['add'], must be")])
def test_tools_that_are_no_descriptions_are_refused(tools: Any, said: str) -> None:
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(DatasetError, match=re.escape(f"row 7: {said}")):
        example("messages", {"messages": talk, "tools": tools})


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_a_tokenizer_without_an_end_is_refused_by_its_name(kind: str) -> None:
    class Endless:
        eos_token_id, name_or_path, all_special_ids, added_tokens_decoder = None, "models/endless", (), ()

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(letter) for letter in text]

        def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool, **_: Any) -> str:
            return "".join(message["content"] for message in messages)

    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = {"text": pb.Example(text="abc"), "messages": pb.Example(messages_json=json.dumps(messages))}
    with pytest.raises(InvalidInput, match=r"tokenizer.eos_token: is missing in models/endless"):
        from_examples(ENTRY, [rows[kind]], Endless(), 64)


def test_a_prompt_longer_than_the_model_trains_nothing(tokenizer: Any) -> None:
    fits, long = {"prompt": "1", "chosen": "2", "rejected": "3"}, {"prompt": "1" * 90, "chosen": "2", "rejected": "3"}
    found = from_examples(ENTRY, [example("pairs", fits), example("pairs", long)], tokenizer, 16)
    assert [(s.pair, s.length, int(s.mask.sum())) for s in found.sequences] == [(1, 6, 2), (-1, 6, 2), (0, 16, 0),
                                                                                (0, 16, 0)]  # fmt: skip
    messages = [{"role": "user", "content": "1" * 90}, {"role": "assistant", "content": "2"}]
    rows = [pb.Example(row=3, messages_json=json.dumps(messages))]
    (expert,) = experts_of(ENTRY, rows, tokenizer, 16)
    assert (expert.length, expert.response_length, expert.expert) == (16, 0, True)


TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
PAIR = {"prompt": "1+1", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("algorithm", "kind", "row", "replies"),
    [("sft", "messages", {"messages": TALK}, ["2<|end|>"]), ("dpo", "pairs", PAIR, ["2<|end|>", "3<|end|>"])],
)
@pytest.mark.parametrize(("value", "begins"), [(None, "?"), (True, "+"), (False, "-")])
def test_a_step_renders_rows_with_enable_thinking_and_refuses_tokens_without_embedding(
    tokenizer: Any,
    tmp_path: Path,
    algorithm: str,
    kind: str,
    row: dict[str, Any],
    replies: list[str],
    value: bool | None,
    begins: str,
) -> None:
    tokenizer.save_pretrained(tmp_path)
    said = "{{ '?' if enable_thinking is not defined else '+' if enable_thinking else '-' }}"
    model = {"model_path": str(tmp_path), "custom_chat_template": said + tokenizer.chat_template, "max_model_len": 64}
    source = {"experience_buffer": {"name": "rows", "path": "rows.jsonl"}}
    config = {
        "mode": "train",
        "checkpoint_root_dir": str(tmp_path),
        "model": {**model, "enable_thinking": value},
        "algorithm": {"algorithm_type": algorithm},
        "buffer": {"train_batch_size": 2, "trainer_input": source},
    }
    engine: Any = SimpleNamespace(vocabulary=len(tokenizer))
    trainer = StepTrainer(make_plan(parse(json.dumps(config))), engine, True, tmp_path, int)
    found = trainer.decode(RawBatch(ENTRY, examples=[example(kind, row)])).sequences
    assert [texts(tokenizer, sequence) for sequence in found] == [(begins + ASKED, reply) for reply in replies]
    engine.vocabulary = tokenizer.convert_tokens_to_ids("<|assistant|>")
    with pytest.raises(InvalidInput, match=r"model_path: its tokenizer has '<\|assistant\|>' as number \d+"):
        trainer.decode(RawBatch(ENTRY, examples=[example(kind, row)]))
