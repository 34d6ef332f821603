"""Starting a run on this machine and keeping it running: checks, services, stages, progress."""
