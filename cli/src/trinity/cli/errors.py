"""What ends a command, in one sentence for the screen."""


class RunError(Exception):
    """The command cannot go on. `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
