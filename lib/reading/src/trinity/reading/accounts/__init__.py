"""Accounts of a run's devices: how long it had them, and where their seconds went."""
