"""Does a provider keep the contract? A suite that anyone can point at an address: `trinity env check ADDRESS`."""

from trinity.sdk.conformance.episodes import Sample
from trinity.sdk.conformance.result import Result, Verdict
from trinity.sdk.conformance.suite import check_provider

__all__ = ["Result", "Sample", "Verdict", "check_provider"]
