"""Names of the headers of commands and results on NATS."""

KIND = "Trinity-Kind"  # of a tenant's command
TENANT = "Trinity-Tenant"  # of a command, and of its result
MODEL = "Trinity-Model"  # of a command: id of the tenant's model, or of the session
SEQ_ID = "Trinity-Seq-Id"  # of a command among those of its model, decimal
PASS = "Trinity-Pass"  # of a command whose body is kept apart: its sequence there, bytes and digest
TIME = "Trinity-Time"  # when the command was accepted, seconds since 1970
REQUEST = "Trinity-Request"  # of a command's result: the command's id
SECONDS = "Trinity-Seconds"  # of a command's result: its seconds of the device
POSITION = "Trinity-Position"  # of a command's result: the command's sequence
