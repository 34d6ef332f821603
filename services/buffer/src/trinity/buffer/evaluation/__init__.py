"""Evaluations beside the training tasks: fed when a version is due, tallied as results come."""
