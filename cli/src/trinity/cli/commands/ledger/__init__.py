"""Commands on the ledger: dead letters, batches, replays."""
