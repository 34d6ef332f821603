"""Algorithms as pure functions of tensors, registered by the names the YAML uses."""
