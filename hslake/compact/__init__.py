"""The compactor: staging to lake. docs/compact.md says what it promises and why that holds.

trouble < sources < due, choose < line < watch, which has `compact`. `listen` shows what it does.
"""

from hslake.compact.line import Condemned
from hslake.compact.watch import GRACE_S, MAX_AGE_S, compact

__all__ = ["GRACE_S", "MAX_AGE_S", "Condemned", "compact"]
