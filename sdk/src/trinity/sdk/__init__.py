"""Environments for Trinity, written as a class and served or attached.

from trinity.sdk import Environment, Observation, attach

class Guess(Environment):
    isolation = "none"

    def reset(self, task, args, seed):
        self.number = task["number"]
        return Observation("Guess a number.")

    def step(self, action):
        right = action.strip() == str(self.number)
        return Observation("Right." if right else "Wrong.", reward=float(right), done=right)

attach(Guess, address="host:7002", token="...")  # or serve(Guess, address="0.0.0.0:7010")
"""

from trinity.sdk.calls import delete_call, reward_call
from trinity.sdk.client import AttachRefused, Tls, attach, attach_async, attaching
from trinity.sdk.environment import AsyncEnvironment, Description, Environment, Observation
from trinity.sdk.errors import InvalidInput
from trinity.sdk.scoring import GroupScorer, ScoreItem, ScoreResult
from trinity.sdk.serve import serve, serve_async, serving
from trinity.sdk.sessions import CallRefused, Session, SessionRefused, open_session

__all__ = [
    "AsyncEnvironment",
    "AttachRefused",
    "CallRefused",
    "Description",
    "Environment",
    "GroupScorer",
    "InvalidInput",
    "Observation",
    "ScoreItem",
    "ScoreResult",
    "Session",
    "SessionRefused",
    "Tls",
    "attach",
    "attach_async",
    "attaching",
    "delete_call",
    "open_session",
    "reward_call",
    "serve",
    "serve_async",
    "serving",
]
