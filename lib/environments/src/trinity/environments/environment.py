"""The interface of an environment. Built-in environments derive from the same class as users' own."""

from trinity.sdk.environment import AsyncEnvironment, Description, Environment, EnvironmentClass, Observation

__all__ = ["AsyncEnvironment", "Description", "Environment", "EnvironmentClass", "Observation"]
