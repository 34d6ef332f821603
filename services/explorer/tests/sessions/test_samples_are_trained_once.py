"""Whatever an agent does to its history: no token is trained that was not sampled, none masked wrongly, none twice."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.data.experience import VersionSpan
from trinity.explorer.sessions.samples import Place, Said, SampleTree, Turn
from trinity.explorer.types import Completion

pytestmark = pytest.mark.core

END, ASK = 1, 2  # the tokens that end a turn, and that ask for a reply
WORDS = ("yes", "no", "call")

Message = dict[str, Any]


def encoded(message: Message) -> list[int]:
    """One token for the role, one for each character: ids below 1000, which the policy never samples."""
    text = Said.of(message)
    return [10 + len(text.role), *(100 + ord(c) % 800 for c in text.content + repr(text.calls)), END]


class Agent:
    """A session with a policy whose every sampled token has an id of its own, and what the policy saw before each."""

    def __init__(self) -> None:
        self.tree = SampleTree()
        self.seen: dict[int, tuple[list[int], float, int]] = {}  # token: (all before it, log-probability, version)
        self.sampled = 1000
        self.forms: list[list[Message]] = [[]]  # histories that the agent holds

    def ask(self, history: list[Message], reply: str, tokens: int, ended: bool, version: int, trained: bool) -> None:
        replies = self.tree.recognise(history)
        place = self.tree.place(self.segments(history, [index for index, _ in replies]), [turn for _, turn in replies])
        found = [index for index, _ in replies]
        assert place.tokens == self.prompt(history, found, place.tokens), "the history as it is now, with sampled ids"
        said: Message = {"role": "assistant", "content": reply}
        self.tree.add(place, self.sample(place, tokens, ended, version), Said.of(said), trained)
        history.append(said)

    def prompt(self, history: Sequence[Message], replies: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The prompt, with the one of equal replies that `tokens` has in its place."""
        found: list[int] = []
        for index, message in enumerate(history):
            if index not in replies:
                found += encoded(message)
                continue
            equal = [turn.completion.token_ids.tolist() for turn in self.tree.turns if turn.reply == Said.of(message)]
            ids = next(one for one in equal if one[0] == tokens[len(found) + 1])
            found += [ASK, *ids, *([END] if ids[-1] != END else [])]
        return [*found, ASK]

    def segments(self, history: Sequence[Message], replies: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for index, message in enumerate(history):
            if index in replies:
                found[-1].append(ASK)
                found.append([END])
            else:
                found[-1] += encoded(message)
        found[-1].append(ASK)
        return found

    def sample(self, place: Place, tokens: int, ended: bool, version: int) -> Completion:
        before, ids = place.tokens, []
        for _ in range(tokens):
            self.sampled += 1
            self.seen[self.sampled] = ([*before, *ids], -self.sampled / 1e6, version)
            ids.append(self.sampled)
        logprobs = [self.seen[token][1] for token in ids]
        if ended:  # END is sampled too; its first token tells which
            ids, logprobs = [*ids, END], [*logprobs, -0.5]
        spans = (VersionSpan(version, 0, len(ids)),)
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), spans, "stop" if ended else "length")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("append", "append", "append", "rewrite", "truncate", "fork", "edit", "again")),
        st.integers(0, 9),  # which history, and where
        st.sampled_from(WORDS),
        st.integers(1, 3),  # tokens of the reply
        st.booleans(),  # whether it ends by itself
        st.booleans(),  # whether it is trained
    ),
    min_size=1,
    max_size=14,
)


def play(actions: Sequence[tuple[str, int, str, int, bool, bool]]) -> Agent:
    agent = Agent()
    for step, (action, where, word, tokens, ended, trained) in enumerate(actions):
        history = agent.forms[where % len(agent.forms)]
        at = where % (len(history) + 1)
        if action == "rewrite" and history:
            history[at % len(history)] = {**history[at % len(history)], "content": word * 2}
        elif action == "truncate":
            del history[at:]
        elif action == "fork":  # a sub-agent, or the same beginning again
            history = list(history[:at])
            agent.forms.append(history)
        elif action == "edit":
            history[:1] = [{"role": "system", "content": word}]
        if action != "again":
            history.append({"role": "user", "content": word})
        agent.ask(history, word, tokens, ended, step, trained)
    return agent


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(ACTIONS)
def test_no_token_is_trained_wrongly_or_twice(actions: Sequence[tuple[str, int, str, int, bool, bool]]) -> None:
    agent = play(actions)
    trained: list[int] = []
    for number, branch in enumerate(agent.tree.branches()):
        experience = branch.experience(number, 1.0)
        experience.check("experience")
        ids = experience.token_ids.tolist()
        response = ids[experience.prompt_length :]
        versions = [span.version for span in experience.version_spans for _ in range(span.start, span.end)]
        for at, token in enumerate(response):
            if not experience.action_mask[at]:
                continue
            if token == END:
                assert response[at - 1] in agent.seen and experience.action_mask[at - 1]
                continue
            before, logprob, version = agent.seen[token]
            assert ids[: experience.prompt_length + at] == before, "the policy saw these tokens before it"
            assert experience.logprobs[at] == pytest.approx(logprob) and versions[at] == version
            trained.append(token)
    expected = [token for turn in agent.tree.turns if turn.trained for token in turn.completion.token_ids.tolist()]
    assert sorted(trained) == [token for token in sorted(expected) if token != END], "each sampled token once"


def reply(tree: SampleTree, history: Sequence[Message], *tokens: int, text: str = "yes") -> Turn:
    agent = Agent()
    agent.tree = tree
    found = tree.recognise(history)
    place = tree.place(agent.segments(history, [index for index, _ in found]), [turn for _, turn in found])
    ids = np.array([*tokens, END], np.int32)
    completion = Completion(ids, np.zeros(len(ids), np.float32), (VersionSpan(0, 0, len(ids)),), "stop")
    return tree.add(place, completion, Said.of({"role": "assistant", "content": text}))


ASKED: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
YES: Message = {"role": "assistant", "content": "yes"}


def test_a_history_that_grows_is_one_branch_with_its_replies_by_id() -> None:
    tree = SampleTree()
    reply(tree, ASKED, 1001, 1002)
    second = reply(tree, [*ASKED, YES, {"role": "user", "content": "two"}], 1003, text="no")
    (branch,) = tree.branches()
    assert branch.turns == 2 and second.parent is tree.turns[0]
    assert branch.tokens[len(branch.prompt) :][:3] == [1001, 1002, END]
    assert branch.tokens.count(END) == len(ASKED) + 1 + 1 + 1, "the end of a turn is there once"


@pytest.mark.parametrize("at", [0, 1])
def test_a_changed_history_is_a_branch_that_still_has_the_replies_by_id(at: int) -> None:
    tree = SampleTree()
    reply(tree, ASKED, 1001)
    edited = [*ASKED, YES, {"role": "user", "content": "two"}]
    edited[at] = {**edited[at], "content": "other"}
    reply(tree, edited, 1002, text="no")
    first, second = (branch.experience(0, 1.0) for branch in tree.branches())
    assert 1001 in second.token_ids.tolist(), "not encoded again"
    assert first.token_ids[first.prompt_length :][first.action_mask].tolist() == [1001, END]
    assert second.token_ids[second.prompt_length :][second.action_mask].tolist() == [1002, END]


def test_a_changed_history_that_grows_is_one_branch() -> None:
    tree = SampleTree()
    reply(tree, ASKED, 1001)
    history = [{"role": "system", "content": "other"}, ASKED[1], YES]
    for text in ("two", "three", "four"):
        history.append({"role": "user", "content": text})
        reply(tree, history, 1002 + len(tree.turns), text=text)
        history.append({"role": "assistant", "content": text})
    assert [branch.turns for branch in tree.branches()] == [1, 3]


def test_sub_agents_with_equal_replies_go_on_from_their_own() -> None:
    tree = SampleTree()
    asked: list[list[Message]] = [[{"role": "user", "content": text}] for text in ("one", "two")]
    for number, history in enumerate(asked):
        reply(tree, history, 1001 + number)
    for number, history in enumerate(asked):
        reply(tree, [*history, YES, {"role": "user", "content": "three"}], 1003 + number, text=str(number))
    assert [[turn.completion.token_ids[0] for turn in one.exchanges] for one in tree.branches()] == [
        [1001, 1003],
        [1002, 1004],
    ]


def test_a_rewritten_reply_is_text_and_is_not_trained() -> None:
    tree = SampleTree()
    reply(tree, ASKED, 1001)
    reply(tree, [*ASKED, {**YES, "content": "yes, but"}, {"role": "user", "content": "two"}], 1002)
    first, second = tree.branches()
    assert 1001 in first.tokens and 1001 not in second.tokens


def test_turns_of_two_branches_are_trained_in_the_newer_one() -> None:
    tree = SampleTree()
    reply(tree, ASKED, 1001)
    for text in ("two", "three"):
        reply(tree, [*ASKED, YES, {"role": "user", "content": text}], 1002 + len(tree.turns), text=text)
    older, newer = tree.branches()
    assert [exchange.trained for exchange in older.exchanges] == [False, True]
    assert [exchange.trained for exchange in newer.exchanges] == [True, True]


def test_a_reply_is_the_same_in_whatever_form_it_comes_back() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    given = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning": "thought"}
    back = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "b"}]}
    back["tool_calls"][0]["function"] = {"name": "add", "arguments": '{"a":1,"b":2}'}
    assert Said.of(given) == Said.of(back)
    assert Said.of({"role": "assistant", "content": [{"type": "text", "text": "yes"}]}) == Said.of(YES)
    other = {**back, "tool_calls": [{"function": {"name": "add", "arguments": '{"a":1,"b":3}'}}]}
    assert Said.of(other) != Said.of(back)
