"""The fixes of attacks that once ended a run: without a fix, the script that replays its attack fails."""

from mutations.mutation import Mutation

_BUFFER = "services/buffer/src/trinity/buffer"
_ENVIRONMENTS = "satellites/environments/src/trinity/environments"
_RUNTIME = "lib/runtime/src/trinity/runtime"
_LIVE = "tests/security/test_attacks_on_a_live_run.py::test_a_run_under_attack_goes_on"
_CHECKPOINT = (
    "tests/security/test_a_replaced_checkpoint.py::test_a_replaced_checkpoint_runs_nothing_and_the_true_one_is_resumed"
)

MUTATIONS = [
    Mutation(
        f"{_BUFFER}/log/reader.py",
        "stored = entry.summary(sequence, self._context.limits)",
        "stored = entry.unchecked_summary(sequence)",
        _LIVE,
    ),
    Mutation(f"{_BUFFER}/log/reader.py", "if owner != owner_of(explorer_id):", "if not explorer_id:", _LIVE),
    Mutation(
        f"{_BUFFER}/evaluation/evaluator.py",
        'except InvalidInput as error:\n            log.warning("buffer.evalu',
        'except BufferError as error:\n            log.warning("buffer.evalu',
        _LIVE,
    ),
    Mutation(
        f"{_BUFFER}/state/context.py",
        "except DataLoss as error:  # sync",
        "except BufferError as error:  # sync",
        _LIVE,
    ),
    Mutation(
        "services/sync/src/trinity/sync/claims.py",
        'if self._is_alive(claim):\n            raise Conflict(\n                f"lease_id: the',
        'if False:\n            raise Conflict(\n                f"lease_id: the',
        _LIVE,
    ),
    Mutation(f"{_ENVIRONMENTS}/allowed.py", 'if module not in _names(MODULES_VARIABLE, ""):', "if not module:", _LIVE),
    Mutation(
        f"{_ENVIRONMENTS}/allowed.py", "if netloc not in allowed and found[1] not in allowed:", "if not netloc:", _LIVE
    ),
    Mutation(
        f"{_ENVIRONMENTS}/bridges/gymnasium.py",
        'any(mark in value for mark in "/\\\\:\\0")',
        'any(mark in value for mark in "\\0")',
        _LIVE,
    ),
    Mutation(
        "satellites/modes/src/trinity/modes/join_config.py",
        "if _code(ours) == _code(theirs):",
        "if _code(ours):",
        _LIVE,
    ),
    Mutation(
        f"{_RUNTIME}/trust/identity.py",
        "if self._token is None or self.insecure or is_loopback(",
        "if True or is_loopback(",
        _LIVE,
    ),
    Mutation(f"{_RUNTIME}/trust/gate.py", "if caller.role not in allowed:", "if not caller.role:", _LIVE),
    Mutation(
        "lib/weights/src/trinity/weights/safe_load.py",
        'torch.load(source, map_location="cpu", weights_only=True, mmap=can_map)',
        'torch.load(source, map_location="cpu", weights_only=False, mmap=can_map)',
        _CHECKPOINT,
    ),
    Mutation(
        f"{_RUNTIME}/broker/client.py",
        "if colon and name not in _OF_THE_SERVER}",
        "if colon}",
        "tests/security/test_leaked_credentials.py::test_no_header_hides_a_message_from_its_readers",
    ),
    Mutation(
        f"{_RUNTIME}/logs.py",
        'return _CREDENTIALS.sub(r"\\1***@", text)',
        "return text",
        "tests/security/test_the_password_of_nats_is_in_no_log.py::test_a_password_is_in_no_line",
    ),
]
