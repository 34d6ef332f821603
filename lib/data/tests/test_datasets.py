"""Reading data: every form, and what is wrong by file and line."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from trinity.config.schema.buffer import FormatConfig
from trinity.data.datasets import DatasetError, preference_pair, read, reader, sft_format, sft_messages
from trinity.runtime.process import free_port

pytestmark = pytest.mark.core

ROWS = [{"question": "1+1", "answer": "2"}, {"question": "zwei\u2028zeilen", "answer": "x"}]


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet"):
        assert list(read(str(tmp_path / name))) == ROWS, name


@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_messages_of_parquet_become_json(kind: str, tmp_path: Path) -> None:
    when = datetime(2024, 1, 1, tzinfo=UTC)
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "1+1", "at": when},
        {"role": "assistant", "content": "2", "at": when},
    ]
    rows = [{"messages": talk, "chosen": talk, "rejected": talk}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    form, (row,) = FormatConfig(prompt_type="messages"), read(str(tmp_path / "a.parquet"))
    for text in reader(kind, form, row)(row, 0).values():
        assert json.loads(text) == [{**message, "at": str(when)} for message in talk]
    talk[0]["at"] = b"123"
    with pytest.raises(DatasetError, match="row 7: its messages hold 3 bytes, must be text"):
        reader(kind, form, rows[0])(rows[0], 7)


def test_a_folder_has_splits_and_subsets(tmp_path: Path) -> None:
    for place, text in (
        ("train.jsonl", "a"),
        ("test-00000.jsonl", "b"),
        ("main/train.jsonl", "c"),
        ("testing.jsonl", "d"),
    ):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(json.dumps({"x": text}) + "\n")
    assert list(read(str(tmp_path), "train")) == [{"x": "a"}]
    assert list(read(str(tmp_path), "test")) == [{"x": "b"}]
    assert list(read(str(tmp_path), "train", "main")) == [{"x": "c"}]


def test_a_slice_of_a_file_is_refused_and_its_own_name_as_split_is_not(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text('{"a": 1}\n')
    assert list(read(str(file), "test")) == [{"a": 1}]
    with pytest.raises(DatasetError, match=r"the split 'train\[:90%\]' cannot be cut out; save these rows as a file"):
        read(str(file), "train[:90%]")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}\n{"a": \n', "line 2"),
        ('{"a": 1}\n\n[1]\n', "line 3: must be a JSON object"),
        ("", "no rows"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(content)
    with pytest.raises(DatasetError, match=said) as refused:
        read(str(file))
    assert str(file) in refused.value.message


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="cannot be read"):
        read(str(tmp_path / "d.jsonl"))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DatasetError, match="cannot be read"):
        read(str(tmp_path / "d.parquet"))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        read(str(tmp_path / "none.jsonl"))
    with pytest.raises(DatasetError, match=f"does not exist; .*; relative paths start in {Path.cwd()}"):
        read("none.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"no train\.jsonl"):
        read(str(tmp_path / "empty"))


INFOS = {
    "main": {
        "description": "GSM8K",
        "features": {"question": {"id": None, "_type": "Value"}, "answer": {"id": None, "_type": "Value"}},
        "splits": {"train": {"name": "train", "num_examples": 99}},
        "builder_name": "gsm8k",
    }
}


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A folder as ModelScope downloads it: old dataset_infos.json (features without dtype), a loader, a README."""
    folder = tmp_path / "gsm8k"
    for subset in ("main", "socratic"):
        for split in ("train", "test"):
            (folder / subset).mkdir(parents=True, exist_ok=True)
            rows = [{"question": f"{subset} {split} {i}", "answer": "#### 2"} for i in range(3)]
            pyarrow.parquet.write_table(
                pyarrow.Table.from_pylist(rows), folder / subset / f"{split}-00000-of-00001.parquet"
            )
    (folder / "dataset_infos.json").write_text(json.dumps(INFOS))
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: main\n---\n# GSM8K\n")
    (folder / "gsm8k.py").write_text("raise RuntimeError('a loader is never run')\n")
    (folder / "train.py").write_text("raise RuntimeError('a script is never run')\n")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / ".msc").write_bytes(b"\x80\x04")
    return folder


@pytest.mark.parametrize("subset", ["main", "socratic"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_folder_as_modelscope_downloads_it_is_read_as_it_is(downloaded: Path, subset: str, split: str) -> None:
    for path in (str(downloaded), f"{downloaded}/"):
        assert [row["question"] for row in read(path, split, subset)] == [f"{subset} {split} {i}" for i in range(3)]
    assert len(read(str(downloaded / subset), split)) == 3  # the subset's own folder, with or without its name again
    assert len(read(str(downloaded / subset), split, subset)) == 3


def test_parts_of_a_split_are_read_in_order_and_the_data_folder_of_a_hub_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for part in (1, 0, 2):
        table = pyarrow.Table.from_pylist([{"part": part, "row": row} for row in range(2)])
        pyarrow.parquet.write_table(table, tmp_path / f"data/train-0000{part}-of-00003.parquet")
    found = read(str(tmp_path))
    assert [(row["part"], row["row"]) for row in found] == [(p, r) for p in range(3) for r in range(2)]


def test_a_subset_that_a_downloaded_folder_lacks_is_not_replaced_by_another(downloaded: Path) -> None:
    for split, subset in (("train", "mian"), ("validation", "main"), ("train", None)):
        with pytest.raises(DatasetError, match=str(downloaded)):
            read(str(downloaded), split, subset)


def test_a_hub_name_without_the_datasets_library_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['datasets'] = None\n"  # as if it were not installed
        "from trinity.data.datasets import DatasetError, read\n"
        "try:\n    read('openai/gsm8k', 'train', 'main')\nexcept DatasetError as error:\n    print(error.message)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'openai/gsm8k' is no file or folder here" in done.stdout
    assert "pip install -e '.[hub]', or give a local path" in done.stdout


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    code = (
        "from trinity.data.datasets import DatasetError, read\n"
        "try:\n    read('openai/gsm8k', 'train', 'main')\nexcept DatasetError as error:\n    print(error.message)"
    )
    environment = {**os.environ, "HF_ENDPOINT": address}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert f"the hub at {address} (HF_ENDPOINT) does not answer (" in done.stdout, done.stderr
    assert "Retrying" not in done.stderr


def test_a_subset_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        (tmp_path / subset / "train.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DatasetError, match="no subset 'mian'; subset_name may be main, socratic"):
        read(str(tmp_path), "train", "mian")
    with pytest.raises(DatasetError, match="subset_name may be main, socratic"):
        read(str(tmp_path), "train")
    assert read(str(tmp_path), "train", "main") == [{"a": 1}]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"question": "1+1", "answer": "2"}, ("question", "answer", "message")),
        ({"prompt": "1+1", "completion": "2"}, ("prompt", "completion", "message")),
        ({"messages": [{"role": "user", "content": "1+1"}]}, ("prompt", "response", "messages")),
    ],
)
def test_usual_forms_of_sft_rows_are_known(row: dict[str, object], keys: tuple[str, str, str]) -> None:
    found = sft_format(FormatConfig(), row)
    assert (found.prompt_key, found.response_key, found.messages_key) == keys


def test_sft_rows_of_another_form_are_refused_with_their_columns() -> None:
    with pytest.raises(DatasetError, match=r"neither a conversation in 'message' .* they have x, y"):
        sft_format(FormatConfig(), {"x": 1, "y": 2})
    with pytest.raises(DatasetError):  # what the YAML says is not replaced by a guess
        sft_format(FormatConfig(prompt_key="q"), {"question": "1+1", "answer": "2"})


def test_a_part_of_a_prompt_is_not_guessed_to_be_the_whole() -> None:
    alpaca = {"instruction": "Find the odd one out.", "input": "a, b, 1", "output": "1"}
    with pytest.raises(DatasetError, match="'instruction' and 'input' belong together: write both into one column"):
        sft_format(FormatConfig(), alpaca)
    named = FormatConfig(prompt_key="instruction", response_key="output")
    assert sft_format(named, alpaca) == named


def test_a_conversation_may_end_with_a_call_of_a_tool() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    talk = [{"role": "user", "content": "1+1"}, call]
    said = sft_messages({"messages": talk}, FormatConfig(messages_key="messages"), 0)
    assert said == [talk[0], {**call, "content": ""}]
    with pytest.raises(DatasetError, match="has a message with the content None"):
        sft_messages({"messages": [talk[0], {"role": "assistant"}]}, FormatConfig(messages_key="messages"), 0)


def test_text_in_parts_is_read_and_other_parts_are_refused() -> None:
    parts = [{"type": "text", "text": "1+", "image": None}, {"type": "text", "text": "1"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "2"}]}]
    form = FormatConfig(messages_key="messages")
    said = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert sft_messages({"messages": talk}, form, 0) == said and talk[0]["content"] is parts
    parts[0] = {"type": "image", "image": "cat.png"}
    with pytest.raises(DatasetError, match=r"row 3: .* must be text, or parts of the type text"):
        sft_messages({"messages": talk}, form, 3)


def test_a_conversation_may_be_json_text() -> None:
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    for form in (FormatConfig(messages_key="talk"), FormatConfig()):
        row = {"talk" if form.messages_key == "talk" else "messages": json.dumps(talk)}
        assert json.loads(reader("messages", form, row)(row, 0)["messages_json"]) == talk
    told = {"messages": "[{ no JSON", "prompt": "1+1", "response": "2"}
    assert json.loads(reader("messages", FormatConfig(), told)(told, 0)["messages_json"]) == talk


def test_prompts_of_pairs_may_be_in_the_column_of_messages() -> None:
    row = {"messages": [{"role": "user", "content": "1+1"}], "chosen": "2", "rejected": "3"}
    form = FormatConfig(messages_key="messages")
    found = reader("pairs", form, row)(row, 0)
    assert json.loads(found["rejected_json"]) == [*row["messages"], {"role": "assistant", "content": "3"}]
    row["prompt"] = "2+2"
    assert "2+2" in reader("pairs", form, row)(row, 0)["messages_json"]


def test_conversations_of_sharegpt_are_read_and_unknown_speakers_refused() -> None:
    talk = [{"from": speaker, "value": speaker} for speaker in ("system", "human", "gpt", "user", "assistant")]
    fields = reader("messages", FormatConfig(), row := {"conversations": talk})(row, 0)
    roles = ("system", "user", "assistant", "user", "assistant")
    said = [{"role": role, "content": one["value"]} for role, one in zip(roles, talk, strict=True)]
    assert json.loads(fields["messages_json"]) == said
    talk[1]["from"] = "observation"
    with pytest.raises(
        DatasetError, match=r"row 3: .* from 'observation', must be from human, gpt, system, user, assistant; write"
    ):
        reader("messages", FormatConfig(), row)(row, 3)


def test_a_row_whose_named_column_is_null_is_refused_by_its_number() -> None:
    form = FormatConfig(prompt_type="plaintext", prompt_key="question", response_key="answer")
    read_row = reader("messages", form, row := {"question": "1+1", "answer": None})
    with pytest.raises(DatasetError, match=r"row 0: 'answer' is None, must be text or messages"):
        read_row(row, 0)


@pytest.mark.parametrize("whole", [False, True])
def test_pairs_of_sharegpt_are_read(whole: bool) -> None:
    asked, said = {"from": "human", "value": "1+1"}, [{"from": "gpt", "value": value} for value in ("2", "3")]
    chosen, rejected = ([asked, one] for one in said) if whole else said
    row = {"conversations": [asked], "chosen": chosen, "rejected": rejected}
    fields = reader("pairs", FormatConfig(prompt_key="conversations"), row)(row, 0)
    for key, answer in (("messages_json", "2"), ("rejected_json", "3")):
        talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answer}]
        assert json.loads(fields[key]) == talk


def test_prompts_and_completions_of_trl_are_texts_or_messages() -> None:
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    form = FormatConfig(prompt_type="plaintext", prompt_key="prompt", response_key="completion")
    for prompt in (talk[:1], "1+1"):
        for completion in (talk[1:], "2"):
            row = {"prompt": prompt, "completion": completion}
            for given in (form, FormatConfig()):  # named by the YAML, and guessed
                assert json.loads(reader("messages", given, row)(row, 0)["messages_json"]) == talk
    read_row = reader("messages", form, {"prompt": "1+1", "completion": "2"})
    for row, said in (
        ({"prompt": [], "completion": "2"}, "'prompt' is .*, must be text or messages"),
        ({"prompt": talk, "completion": talk[:1]}, "'completion' is .*, must be text, or messages that end with the"),
        ({"prompt": ["1+1"], "completion": "2"}, "'1\\+1', must be a message with a role"),
    ):
        with pytest.raises(DatasetError, match=f"row 3: .*{said}"):
            read_row(row, 3)


def test_a_conversation_gets_the_system_message_of_its_row_unless_it_has_its_own() -> None:
    form = FormatConfig(messages_key="conversations", system_prompt_key="system")
    told = [{"from": "human", "value": "2+3"}, {"from": "gpt", "value": "5"}]
    said = sft_messages({"system": "Be brief.", "conversations": told}, form, 1)
    assert said[0] == {"role": "system", "content": "Be brief."} and len(said) == 3
    own = {"from": "system", "value": "Be long."}
    assert sft_messages({"system": "Be brief.", "conversations": [own, *told]}, form, 1)[0]["content"] == "Be long."
    assert len(sft_messages({"system": None, "conversations": told}, form, 1)) == 2
    pair = {"system": "Be brief.", "prompt": told[:1], "chosen": "5", "rejected": "6"}
    whole = {"system": "Be brief.", "chosen": told, "rejected": told}
    for one in (pair, whole):
        chosen, rejected = preference_pair(one, FormatConfig(system_prompt_key="system"), 1)
        assert chosen[0] == rejected[0] == {"role": "system", "content": "Be brief."}
