"""A model folder whose tokenizer has a token for each character."""

from pathlib import Path


def make_tokenizer_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!")
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder
