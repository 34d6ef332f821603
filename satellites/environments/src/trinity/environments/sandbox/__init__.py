"""Sandboxes by bubblewrap and docker, the environment that plays in them, and a reward function."""
