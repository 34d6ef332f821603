"""Guards against providers, explorers and members that lie."""

from mutations.mutation import Mutation

_EXPLORER, _ENVIRONMENT = "services/explorer/src/trinity/explorer", "services/environment/src/trinity/environment"
_EPISODES = "services/explorer/tests/environments/test_episodes_of_several_providers.py"
_ATTACHED = "services/environment/tests/test_attached_providers_that_break_the_contract.py"

MUTATIONS = [
    Mutation(
        f"{_EXPLORER}/environments/episode.py",
        " or self._totals.problem(answer)",
        "",
        f"{_EPISODES}::test_an_episode_that_breaks_a_bound_answer_by_answer_is_the_providers_failure",
    ),
    Mutation(
        f"{_EXPLORER}/environments/client.py",
        "contract.score_problem(len(request.items), scores, self._reward_bound)",
        "contract.score_problem(len(request.items), scores)",
        f"{_EPISODES}::test_scores_beyond_the_bounds_are_the_providers_failure",
    ),
    Mutation(
        f"{_EXPLORER}/environments/types.py",
        ', "metadata size exceeds")',
        ",)",
        f"{_EPISODES}::test_a_failed_step_has_its_cause",
    ),
    Mutation(
        f"{_EXPLORER}/journal/journal.py",
        "restore(last, self._earned)",
        "restore(last)",
        "services/explorer/tests/journal/test_an_episode_goes_on_from_a_state.py"
        "::test_rewards_before_the_state_count_toward_the_bound",
    ),
    Mutation(
        f"{_EXPLORER}/sessions/offers.py",
        "if is_number(value) and not is_number(value, self._reward_bound):",
        "if False:",
        "services/explorer/tests/sessions/test_sessions_from_outside.py"
        "::test_a_wrong_reward_is_a_400_and_fails_the_attempt",
    ),
    Mutation(
        f"{_ENVIRONMENT}/attached.py",
        "if problem := self._totals.problem(answer):",
        'if problem := "":',
        f"{_ATTACHED}::test_a_provider_that_breaks_the_contract_or_is_silent_fails_its_own_episode_and_is_avoided",
    ),
    Mutation(
        f"{_ENVIRONMENT}/servicer.py",
        "if attachment.ended:",
        "if False:",
        f"{_ATTACHED}::test_of_a_flood_of_replies_in_one_message_only_the_first_are_read",
    ),
    Mutation(
        "lib/data/src/trinity/data/experience.py",
        "> _CERTAIN:",
        "> 1.0:",
        "lib/data/tests/test_wire_refuses_what_cannot_be_right.py::test_two_tokens_in_one_place_are_not_both_certain",
    ),
    Mutation(
        "services/buffer/src/trinity/buffer/log/wire.py",
        "self.group().check(limits)",
        "self.group()",
        "services/buffer/tests/test_entries_are_validated.py"
        "::test_two_rollouts_that_are_certain_of_different_tokens_in_one_place_are_refused",
    ),
    Mutation(
        "services/trainer/src/trinity/trainer/weights/collective.py",
        "self._pause = min(2 ** (self._failures - 1), _MOST_PUBLISHES_LEFT_OUT) - 1",
        "self._pause = 0",
        "services/trainer/tests/weights/test_members_that_do_not_connect.py"
        "::test_a_member_that_comes_again_under_new_names_costs_few_deadlines",
    ),
    Mutation(
        "cli/src/trinity/cli/supervise/stage/disk.py",
        "if self._nats is None and _NATS_REFUSED",
        "if False and _NATS_REFUSED",
        "cli/tests/supervise/test_a_full_disk_holds_a_run.py::test_the_disk_of_another_ones_nats_is_not_looked_for_here",
    ),
    Mutation(
        "lib/weights/src/trinity/weights/client.py",
        "return name if namespace == _FIRST_NAMESPACE else",
        "return name if namespace else",
        "lib/weights/tests/test_processes_of_containers.py::test_processes_of_two_pid_namespaces_differ",
    ),
]
