"""`hslake preflight`: go or no-go before a long run. Changes nothing in the lake."""

from hslake.preflight.report import Pace, PreflightReport
from hslake.preflight.run import preflight

__all__ = ["Pace", "PreflightReport", "preflight"]
