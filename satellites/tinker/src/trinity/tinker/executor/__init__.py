"""Executes the commands of tenants that train adapters of different ranks on one base model."""
