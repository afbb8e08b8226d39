"""Layered checks of an RL run: data, reward, policy, gradient, optimizer; each also a library function.

What each check of the published GRPO debugging guide became, with its numbers: docs/checks.md.
"""

from gradloc.checks.finding import CheckFinding, Report, Skipped
from gradloc.checks.kinds import KINDS, LAYERS, Kind

__all__ = ["KINDS", "LAYERS", "CheckFinding", "Kind", "Report", "Skipped"]
