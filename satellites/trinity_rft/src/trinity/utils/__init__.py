"""Helpers that plugins written for Trinity-RFT import: see docs/from_trinity.md."""
