"""Steps trained again from the ledger, or from the kept batch of a bad step."""
