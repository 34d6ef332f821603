"""Names of the headers that Trinity adds to its messages, besides NATS's own and `traceparent`."""

CRC32 = "Trinity-Crc32"  # of the payload, decimal
ORDINAL = "Trinity-Ordinal"  # of the task, decimal
POSITION = "Trinity-Position"  # of the taskset after this task, decimal
FED = "Trinity-Fed"  # tasks fed with this one, decimal
EVALUATION_STEP = "Trinity-Evaluation-Step"
EVALUATION_INDEX = "Trinity-Evaluation-Index"
REQUEUED = "Trinity-Requeued"  # log sequence of the newest requeue fed by then, decimal
JOINED = "Trinity-Joined"  # JSON: of each joined taskset, tasks fed by then
REWARDED = "Trinity-Rewarded"  # sequence of the newest call's reward fed by then, decimal
TRACEPARENT = "traceparent"
