"""What is wrong with one checkpoint; the others are still converted."""


class CheckpointError(Exception):
    """One sentence that names the file and, if there is one, the fix."""
