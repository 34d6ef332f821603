"""Calls of a provider, by the command line and by trinity-conformance."""
