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
KIND = "Trinity-Kind"  # of a tenant's command
TENANT = "Trinity-Tenant"  # of a command, and of its result
MODEL = "Trinity-Model"  # of a command: id of the tenant's model, or of the session
SEQ_ID = "Trinity-Seq-Id"  # of a command among those of its model, decimal
PASS = "Trinity-Pass"  # of a command whose body is kept apart: its sequence there, bytes and digest
TIME = "Trinity-Time"  # when the command was accepted, seconds since 1970
REQUEST = "Trinity-Request"  # of a command's result: the command's id
SECONDS = "Trinity-Seconds"  # of a command's result: its seconds of the device
TRACEPARENT = "traceparent"
