"""A chat is token in, token out: what was sampled is what is trained, and templates that rewrite history are found."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Truncation, VersionSpan
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.types import Completion
from trinity.explorer.weights.load_history import WeightsWithdrawn
from trinity.explorer.workflows.conversation import Conversation
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

ROLES = "".join(
    "{% if m.role == '" + role + "' %}<|" + role + "|>{% endif %}" for role in ("system", "user", "assistant", "tool")
)
PLAIN = (
    "{% for m in messages %}" + ROLES + "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As models that think do it: in turns before the last question what was thought is left out.
FORGETS_THOUGHTS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}")
BEGINS_THINKING = PLAIN[: PLAIN.rindex("<|assistant|>")] + "<|assistant|><think>{% endif %}"
ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + PLAIN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte tokenizer that merges `a` and `b`: the same text has two spellings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=[f"<|{role}|>" for role in ("system", "user", "assistant", "tool")],
    ).save_pretrained(tmp_path)
    return tmp_path


def chat(folder: Path, template: str = PLAIN) -> ChatTokenizer:
    return ChatTokenizer(ModelConfig(model_path=str(folder), custom_chat_template=template))


def sampled(tokens: list[int], version: int = 0, finish_reason: str = "stop") -> Completion:
    ids = np.array(tokens, np.int32)
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Completion(ids, logprobs, (VersionSpan(version, 0, len(ids)),), finish_reason)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_what_was_sampled_is_what_is_trained_where_tokenising_again_differs(folder: Path) -> None:
    chats = chat(folder)
    a, b, merged, end = (chats.tokens(text)[0] for text in ("a", "b", "ab", "<|end|>"))
    reply = [a, b, end]
    assert chats.tokens(chats.text(reply)) == [merged], "tokenised again, it would be another sequence"

    conversation = Conversation(tuple(chats.prompt(user("go"))))
    conversation = conversation.replied(sampled(reply, version=3))
    conversation = conversation.told(chats.next_turn(user("more")))
    conversation = conversation.replied(sampled([merged, end], version=4))
    experience = conversation.experience(rollout=1, reward=0.5)

    experience.check("it")
    tokens = experience.token_ids.tolist()
    assert tokens[: experience.prompt_length] == chats.prompt(user("go"))
    response = tokens[experience.prompt_length :]
    assert response[:3] == reply
    assert response[-2:] == [merged, end]
    assert response.count(end) == 3, "of both replies and of the question between them; none is written twice"
    assert [t for t, m in zip(response, experience.action_mask, strict=True) if m] == [*reply, merged, end]
    assert experience.logprobs[experience.action_mask].tolist() == [-1, -2, -3, -1, -2]
    assert not experience.logprobs[~experience.action_mask].any()
    assert experience.version_spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, len(response)))
    retold = [
        *user("go"),
        {"role": "assistant", "content": "ab"},
        *user("more"),
        {"role": "assistant", "content": "ab"},
    ]
    assert chats.text(tokens) == chats.text(chats.conversation(retold)).rstrip("\n")


def test_a_reply_that_reached_its_limit_gets_the_token_that_ends_a_turn_untrained(folder: Path) -> None:
    chats = chat(folder)
    (a,), (end,) = chats.tokens("a"), chats.tokens("<|end|>")
    cut = Conversation(tuple(chats.prompt(user("go")))).replied(sampled([a], finish_reason="length"))
    assert cut.experience(0, 0.0).truncation is Truncation.RESPONSE
    told = cut.told(chats.next_turn(user("more")))
    assert told.pending[0] == end
    whole = told.replied(sampled([a, end])).experience(0, 0.0)
    assert whole.truncation is Truncation.NONE
    assert whole.action_mask.tolist() == [True, *[False] * len(told.pending), True, True]


def test_former_turns_can_be_kept_out_of_training(folder: Path) -> None:
    chats = chat(folder)
    (a,), (end,) = chats.tokens("a"), chats.tokens("<|end|>")
    conversation = Conversation(tuple(chats.prompt(user("go")))).replied(sampled([a, end]))
    conversation = conversation.told(chats.next_turn(user("more"))).replied(sampled([a, a, end]))
    experience = conversation.experience(0, 1.0, untrained_turns=1)
    assert np.flatnonzero(experience.action_mask).tolist() == list(range(len(experience.logprobs)))[-3:]


def test_a_step_has_all_before_it_as_its_prompt(folder: Path) -> None:
    chats = chat(folder)
    (a,), (end,) = chats.tokens("a"), chats.tokens("<|end|>")
    first = Conversation(tuple(chats.prompt(user("go")))).replied(sampled([a, end]))
    both = first.told(chats.next_turn(user("more"))).replied(sampled([a, a, end], version=2))
    step = both.step_experience(1, rollout=4, reward=1.0)
    step.check("it")
    assert (step.rollout, step.step) == (4, 1)
    assert step.token_ids.tolist() == both.tokens
    assert step.prompt_length == len(both.tokens) - 3
    assert step.version_spans == (VersionSpan(2, 0, 3),)
    assert both.before_turn(1) == first


def test_weights_that_go_back_in_a_conversation_end_it(folder: Path) -> None:
    chats = chat(folder)
    conversation = Conversation(tuple(chats.prompt(user("go")))).replied(sampled([5], version=3))
    with pytest.raises(WeightsWithdrawn, match="from version 3 to 2"):
        conversation.told(chats.next_turn(user("more"))).replied(sampled([5], version=2))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (PLAIN, ""),
        (FORGETS_THOUGHTS, "it leaves out what was thought in former turns"),
        (BEGINS_THINKING, "it writes former replies otherwise than it asked for them"),
        (ONE_TURN, "it takes no conversation of several turns: messages: the chat template refuses them: one message"),
    ],
)
def test_templates_that_rewrite_history_are_found(folder: Path, template: str, problem: str) -> None:
    found = chat(folder, template).history_problem
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_a_template_that_does_not_compile_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"model.custom_chat_template: does not compile: line 2: ") as refused:
        chat(folder, "text\n{% if messages %}")
    assert refused.value.for_good


def test_a_template_that_refuses_a_message_is_bad_input(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="one message only"):
        chat(folder, ONE_TURN).next_turn(user("more"))


def test_half_of_a_surrogate_pair_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="half of a surrogate pair"):
        chat(folder).prompt(user("a\ud800b"))


def test_a_reply_has_the_begin_that_the_prompt_wrote(folder: Path) -> None:
    chats = chat(folder, BEGINS_THINKING)
    assert chats.text(chats.prompt(user("go"))).endswith("<think>")
    assert chats.reply(chats.tokens("ab</think>b<|end|>")) == "<think>ab</think>b"
    assert chat(folder).reply(chats.tokens("ab<|end|>")) == "ab"


def test_the_end_of_a_turn_that_is_no_eos_is_known(folder: Path) -> None:
    other = PLAIN.replace("<|end|>", "<|tool|>")
    assert chat(folder, other).turn_end == chat(folder).tokens("<|tool|>")[0]


THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}" + PLAIN


@pytest.mark.parametrize(("value", "closed"), [(None, False), (True, False), (False, True)])
def test_enable_thinking_reaches_the_template(folder: Path, value: bool | None, closed: bool) -> None:
    model = ModelConfig(model_path=str(folder), custom_chat_template=THINKING, enable_thinking=value)
    tokenizer = ChatTokenizer(model)
    assert tokenizer.text(tokenizer.prompt(user("a"))).startswith("<think></think>") == closed
