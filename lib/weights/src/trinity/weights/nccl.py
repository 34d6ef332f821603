"""What torch is told about NCCL, so that a group of trainer and explorers that breaks ends nothing but itself.

torch watches every group of NCCL with threads of its own. A collective that is late by its clock, or that fails, lets
the thread stand still for a minute, which the end of the group waits for; and eight minutes later the monitor of the
process's first group, be it another one, ends the process. (ProcessGroupNCCL.cpp of torch 2.11: Watchdog::runLoop,
HeartbeatMonitor::runLoop.)
"""

from datetime import timedelta

# Before a process makes its first group, and for its children.
OF_PROCESS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
# While the group that may break is made: what goes wrong in it is found, and said, by who waits for it.
OF_GROUP = {
    **OF_PROCESS,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# The clock of such a group.
NEVER = timedelta(days=365)
