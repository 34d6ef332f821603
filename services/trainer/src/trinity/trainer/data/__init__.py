"""Ledger entries to micro-batches: the client of the buffer, batches, rows of datasets, bad steps."""
