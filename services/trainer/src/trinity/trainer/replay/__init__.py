"""Steps trained again from the ledger, or from the stored batch of a bad step."""
