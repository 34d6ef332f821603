"""Evaluations: fed when a version is due, tallied as results come."""
