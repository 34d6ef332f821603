"""Settings of torch for NCCL, so that a broken group of trainer and explorers does not end its processes.

torch watches every group of NCCL with threads. A collective that times out or fails blocks
that thread for a minute, and destroying the group waits for it. Eight minutes later the monitor of the process's first
group, even if that is another one, ends the process. (ProcessGroupNCCL.cpp of torch 2.11: Watchdog::runLoop,
HeartbeatMonitor::runLoop.)
"""

from datetime import timedelta

# Set before a process makes its first group, and for its children.
OF_PROCESS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
# Set while a group that may break is made: the thread that waits for it finds and reports its errors.
OF_GROUP = {
    **OF_PROCESS,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# The timeout of such a group.
NEVER = timedelta(days=365)
