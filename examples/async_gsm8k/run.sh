#!/bin/bash
# One trainer and one explorer, each a command of its own; their order does not matter. Another one may join at any time:
#   trinity run --config examples/async_gsm8k/explorer_new.yaml
# On several machines: docs/modes.md (TRINITY_NATS_URL for every command, TRINITY_HOST for the trainer's).
cd "$(dirname "$0")/../.." || exit 1
[ -x .venv/bin/trinity ] && PATH="$PWD/.venv/bin:$PATH"
trinity run --config examples/async_gsm8k/explorer.yaml "$@" &
explorer=$!
trap 'kill -TERM $explorer 2>/dev/null' EXIT
trap 'exit 130' INT TERM
trinity run --config examples/async_gsm8k/trainer.yaml "$@" &
trainer=$!
wait $trainer
code=$?
[ $code -eq 0 ] && wait $explorer
exit $code
