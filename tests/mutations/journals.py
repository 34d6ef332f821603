"""The guards of episodes that continue elsewhere: without a guard, its test finds a token that was not sampled."""

from mutations.mutation import Mutation

_JOURNAL = "services/explorer/src/trinity/explorer/journal"
_ELSEWHERE = "services/explorer/tests/journal/test_an_episode_continues_elsewhere.py"
_STATES = "services/explorer/tests/journal/test_an_episode_goes_on_from_a_state.py"
_ATTEMPTS = "services/explorer/tests/journal/test_turns_of_all_attempts.py"

MUTATIONS = [
    Mutation(
        f"{_JOURNAL}/journal.py",
        "same = kept.turn.seen == seen",
        "same = True",
        f"{_ELSEWHERE}::test_an_environment_that_answers_otherwise_is_played_again_from_there",
    ),
    Mutation(
        f"{_JOURNAL}/journal.py",
        "not all(map(self._journal.usable, kept.versions))",
        "False",
        f"{_ELSEWHERE}::test_withdrawn_versions_are_sampled_again",
    ),
    Mutation(
        f"{_JOURNAL}/journal.py",
        "if known.newest_version >= 0 and not await self.reaches(known.newest_version):",
        "if False:",
        f"{_ELSEWHERE}::test_an_explorer_with_older_weights_waits_for_newer_ones_or_begins_again",
    ),
    Mutation(
        f"{_JOURNAL}/turns.py",
        "earlier = sorted((entry for entry in entries if entry.attempt < attempt), key=lambda entry: entry.attempt)",
        "earlier = list(entries)",
        f"{_ATTEMPTS}::test_a_process_whose_lease_ended_changes_nothing_of_the_next_holder",
    ),
    Mutation(
        f"{_JOURNAL}/turns.py",
        "if known.fruitless >= _FRUITLESS:",
        "if False:",
        f"{_ELSEWHERE}::test_an_episode_that_kills_its_explorers_begins_again_and_ends_as_a_dead_letter",
    ),
    Mutation(
        "services/explorer/src/trinity/explorer/rollout/attempt.py",
        "await journal.abandon(cause)",
        "pass",
        f"{_ELSEWHERE}::test_a_failed_attempt_is_not_continued",
    ),
    Mutation(
        f"{_JOURNAL}/journal.py",
        "known = self._journal.answer(self._last.turn + 1)",
        "known = None",
        f"{_STATES}::test_the_state_is_restored_and_no_action_is_played_again",
    ),
    Mutation(
        f"{_JOURNAL}/journal.py",
        "self._heard = kept.turn.answer or self._heard",
        "pass",
        f"{_STATES}::test_withdrawn_versions_are_sampled_again_in_the_state_before_them",
    ),
    Mutation(
        f"{_JOURNAL}/journal.py",
        "self._writing.append(self._journal.start_writing(entry))",
        "pass",
        f"{_STATES}::test_the_state_is_restored_and_no_action_is_played_again",
    ),
    Mutation(
        f"{_JOURNAL}/turns.py",
        "if at >= len(turns) or turns[at].turn.reply != entry.reply:",
        "if at >= len(turns):",
        f"{_ATTEMPTS}::test_an_answer_to_another_reply_is_left_out",
    ),
    Mutation(
        "sdk/src/trinity/sdk/wire.py",
        "if checksum != _checksum(name, state):",
        "if False:",
        f"{_STATES}::test_a_damaged_journal_begins_again",
    ),
]
