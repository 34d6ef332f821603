"""Lines that require a caller's identity and compare its role."""

from mutations.mutation import Mutation

_TRUST = "lib/runtime/src/trinity/runtime/trust"
_PERMISSIONS = "tests/contract/test_permissions.py"

MUTATIONS = [
    Mutation(
        f"{_TRUST}/gate.py",
        "if caller.role not in allowed:",
        "if not caller.role:",
        f"{_PERMISSIONS}::test_a_role_may_call_what_the_table_says_and_nothing_else",
    ),
    Mutation(
        f"{_TRUST}/gate.py",
        "if shown is None and method in CHECKED_BY_SERVICE:",
        "if shown is None:",
        f"{_PERMISSIONS}::test_no_method_answers_a_caller_without_identity",
    ),
    Mutation(
        f"{_TRUST}/tokens.py",
        "if hmac.compare_digest(digest, shown):",
        "if digest:",
        f"{_PERMISSIONS}::test_a_token_of_another_run_is_none",
    ),
    Mutation(
        f"{_TRUST}/tokens.py",
        "if changed == self._read_at:",
        "if self._digests:",
        f"{_PERMISSIONS}::test_a_revoked_token_is_none_and_a_replaced_one_is_read_again",
    ),
    Mutation(
        "lib/runtime/src/trinity/runtime/host.py",
        "if not local and not settings.insecure:",
        "if False:",
        f"{_PERMISSIONS}::test_without_identities_a_service_is_for_this_machine_alone",
    ),
    Mutation(
        f"{_TRUST}/tls.py",
        "    ca.check_signers(chain)\n",
        "",
        "tests/contract/test_permissions_tls.py::test_a_holder_of_a_certificate_is_no_authority",
    ),
    Mutation(
        f"{_TRUST}/identity.py",
        "if peer.serial in revoked:",
        "if False:",
        "tests/contract/test_permissions_tls.py::test_a_revoked_certificate_is_refused_and_others_are_not",
    ),
    Mutation(
        f"{_TRUST}/revoked.py",
        "if stamp != self._stamp:",
        "if False:",
        "tests/contract/test_permissions_tls.py::test_a_revoked_certificate_is_refused_and_others_are_not",
    ),
]
