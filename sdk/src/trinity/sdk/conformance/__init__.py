"""Checks that the provider at an address keeps the contract: `trinity env check ADDRESS`."""

from trinity.sdk.conformance.episodes import Sample
from trinity.sdk.conformance.result import Result, Verdict
from trinity.sdk.conformance.suite import check_provider

__all__ = ["Result", "Sample", "Verdict", "check_provider"]
