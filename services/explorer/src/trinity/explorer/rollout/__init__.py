"""From a task in the queue to experience in the log: the lease, the attempt, the tools a workflow gets."""
