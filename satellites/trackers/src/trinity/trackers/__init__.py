"""Metrics at services of others. The core finds each kind by the entry points `trinity.monitors`."""
