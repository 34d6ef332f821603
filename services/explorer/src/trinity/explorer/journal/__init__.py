"""Unfinished episodes are kept turn by turn, so that the next holder of a task's lease continues them."""
