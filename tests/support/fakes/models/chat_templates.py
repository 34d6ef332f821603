"""The chat templates of model families, written anew with their behaviour, and a tokenizer for each.

A template keeps what matters to training: special tokens, where thoughts are opened and dropped, the end of a turn,
system prompts and tools. The tokenizer knows every byte and the family's special tokens; it has no vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ASK = "{% if add_generation_prompt %}"
_CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endif %}{% endfor %}"
)
_TOOLS = "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_AFTER_LAST = (  # ns.last: the last message of the user
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_THOUGHTS = "m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else ''"
_ANSWER = "m.content.split('</think>')[-1].lstrip('\n')"
_ALTERNATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) "
    "%}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """`ends`: eos tokens of generation_config.json. `settings`: the model's section of a YAML."""

    name: str
    template: str
    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...] = ()
    thinking: bool | None = None

    def tokenizer(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=self.eos,
            additional_special_tokens=[token for token in self.special if token != self.eos],
            chat_template=self.template,
        )

    def save(self, folder: Path) -> Path:
        """A folder with tokenizer, config.json and generation_config.json."""
        import json

        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text("{}")
        ends = [tokenizer.convert_tokens_to_ids(token) for token in self.ends or (self.eos,)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return folder


def _qwen3(asked: str) -> str:
    said = (
        "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ " + _THOUGHTS + " }}\n</think>\n\n"
        "{% endif %}{{ " + _ANSWER + " }}<|im_end|>\n"
    )
    others = _CHATML.replace("CONTENT", "m.content")
    others = others.removeprefix("{% for m in messages %}").removesuffix("{% endfor %}")
    head = "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    body = "{% for m in messages %}{% if m.role == 'assistant' %}" + said + "{% else %}" + others + "{% endif %}"
    return head + _AFTER_LAST + body + "{% endfor %}" + _ASK + "<|im_start|>assistant\n" + asked + "{% endif %}"


_QWEN25 = (
    "{% if tools or messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.\n" + _TOOLS +
    "<|im_end|>\n{% endif %}" + _CHATML.replace("CONTENT", "m.content") + _ASK + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_CLOSED = "<think>\n\n</think>\n\n"
_QWEN3 = _qwen3("{% if enable_thinking is defined and not enable_thinking %}" + _CLOSED + "{% endif %}")
_QWEN35 = _qwen3(
    "{% if enable_thinking is defined and not enable_thinking %}" + _CLOSED + "{% else %}<think>\n{% endif %}"
)
_QWQ = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    + _CHATML.replace("CONTENT", f"({_ANSWER}) if m.role == 'assistant' and not loop.last else m.content")
    + _ASK + "<|im_start|>assistant\n<think>\n{% endif %}"
)  # fmt: skip
_R1 = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    + _ASK + "<｜Assistant｜><think>\n{% endif %}"
)  # fmt: skip
_LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if tools and m.role == 'user' and loop.index0 == messages | length - 1 %}" + _TOOLS +
    "{% endif %}{{ m.content | trim }}<|eot_id|>{% endfor %}"
    + _ASK + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)  # fmt: skip
_LLAMA4 = (
    _LLAMA3.replace("start_header_id", "header_start").replace("end_header_id", "header_end").replace("eot_id", "eot")
)
_GEMMA3 = (
    "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}" + _ALTERNATE +
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    + _ASK + "<start_of_turn>model\n{% endif %}"
)  # fmt: skip
_GEMMA2 = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + _GEMMA3
_MISTRAL = (
    "<s>{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
_PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    + _ASK + "<|im_start|>assistant<|im_sep|>{% endif %}"
)  # fmt: skip
_GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}" + _AFTER_LAST +
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>{% if loop.index0 > ns.last %}{{ "
    + _THOUGHTS + " }}{% endif %}</think>\n{{ " + _ANSWER + " }}{% elif m.role == 'tool' %}<|observation|>\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}" + _ASK + "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}\n<think></think>"
    "{% endif %}{% endif %}"
)  # fmt: skip
_GPT_OSS = (
    "<|start|>system<|message|>You are a large language model.<|end|>{% if tools %}<|start|>developer<|message|>"
    + _TOOLS + "<|end|>{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>"
    "final<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}" + _ASK + "<|start|>assistant{% endif %}"
)  # fmt: skip
_SMOLLM3 = (
    "{% set think = enable_thinking is not defined or enable_thinking %}<|im_start|>system\n## Metadata\n\n"
    "Reasoning Mode: {{ '/think' if think else '/no_think' }}\n\n## Custom Instructions\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    + _TOOLS.replace("tools %}", "xml_tools %}") +
    "<|im_end|>\n{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ '' if think else '<think>\n\n</think>\n' }}{{ m.content.lstrip('\n') }}<|im_end|>\n{% else %}<|im_start|>"
    "{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + _ASK + "<|im_start|>assistant\n{{ '' if think else '<think>\n\n</think>\n' }}{% endif %}"
)  # fmt: skip
_GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>" + _TOOLS + "<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    + _ASK + "<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)  # fmt: skip

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_L3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_L4 = ("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>")
_G = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_M = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
      "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
_Z = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_O = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>")
_D = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>",
      "<｜tool▁output▁end｜>")  # fmt: skip
_R = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")

FAMILIES = (
    Family("Qwen2.5", _QWEN25, _IM, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    Family("Qwen2.5 base", _QWEN25, _IM, "<|endoftext|>"),
    Family("Qwen3", _QWEN3, _IM, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    Family("Qwen3, enable_thinking: false", _QWEN3, _IM, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), False),
    Family("Qwen3.5", _QWEN35, _IM, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    Family("QwQ", _QWQ, _IM, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    Family("R1 distillations", _R1, _D, "<｜end▁of▁sentence｜>"),
    Family("Llama 3", _LLAMA3, _L3, "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
    Family("Llama 4", _LLAMA4, _L4, "<|eot|>", ("<|end_of_text|>", "<|eom|>", "<|eot|>")),
    Family("Gemma 2", _GEMMA2, _G, "<eos>", ("<eos>", "<end_of_turn>")),
    Family("Gemma 3", _GEMMA3, _G, "<eos>", ("<eos>", "<end_of_turn>")),
    Family("Mistral", _MISTRAL, _M, "</s>"),
    Family("Phi-4", _PHI4, (*_IM, "<|im_sep|>"), "<|im_end|>"),
    Family("GLM-4.5", _GLM, _Z, "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    Family("gpt-oss", _GPT_OSS, _O, "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>")),
    Family("SmolLM3", _SMOLLM3, _IM, "<|im_end|>"),
    Family("SmolLM3, enable_thinking: false", _SMOLLM3, _IM, "<|im_end|>", (), False),
    Family("Granite", _GRANITE, _R, "<|end_of_text|>"),
)
