"""Starts a run on this machine and keeps it running: checks, processes, stages, progress."""
