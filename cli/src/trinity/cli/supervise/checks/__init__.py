"""Checks before a run starts: the YAML against model, data and this machine."""
