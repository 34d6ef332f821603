"""Environments and scorers as clients see them: providers, episodes, slots, failures."""
