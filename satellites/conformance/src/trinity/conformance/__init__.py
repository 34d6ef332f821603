"""Checks that the provider at an address keeps the contract: `trinity env check ADDRESS`.

The command line reaches `Sample` and `report` by the hook `conformance`. Tests call `check_provider`.
"""

from trinity.conformance.episodes import Sample
from trinity.conformance.report import report
from trinity.conformance.result import Result, Verdict
from trinity.conformance.suite import check_provider

__all__ = ["Result", "Sample", "Verdict", "check_provider", "report"]
