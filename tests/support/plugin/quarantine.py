"""Tests that fail now and then for a reason that is not found yet: at most five, each with what is known.

They run, and their failures are shown as XFAIL. CONTRIBUTING.md lists the same (tests/contract/test_tiers.py).
"""

QUARANTINED: dict[str, str] = {  # node id -> what is known of its failures
    "tests/chaos/test_cases_of_weights_and_members.py::"
    "test_nothing_is_violated_on_three_nats_servers[nats-server-killed]": "on a loaded machine no batch came for 60 s "
    "after the killed NATS server was started again; the sync service's writes were not answered meanwhile",
}
