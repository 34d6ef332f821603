"""The interface of an environment. Built-in ones derive from the same class as everybody else's."""

from trinity.sdk.environment import AsyncEnvironment, Description, Environment, EnvironmentClass, Observation

__all__ = ["AsyncEnvironment", "Description", "Environment", "EnvironmentClass", "Observation"]
