"""Contradictions between the keys of a configuration. Each module checks one section; `sections` checks them all."""
