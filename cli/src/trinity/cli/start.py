"""The entry of the trinity command. Ctrl-C ends it without a traceback while its modules are still being imported."""

import signal


def start() -> None:
    """Loads and calls the command."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not in the background, where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from trinity.cli.main import app

    signal.signal(signal.SIGINT, handler)
    app()
