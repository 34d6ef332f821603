"""From ledger entries to micro-batches: the client of the buffer, batches, rows of datasets, kept bad steps."""
