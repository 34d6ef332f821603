"""Samples by the adapters that tenants of `trinity tinker` saved, and by their base model."""
