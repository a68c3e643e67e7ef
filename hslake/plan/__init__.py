"""The plan: which samples ought to exist in a lake, from files of tokens, text or conversations.

`files` and `folders` read rows, `chat`, `render` and `tokens` make tokens of text, `prepare` and
`pieces` make samples, `spill` keeps them on disk, `decide` says which are new, `run` commits them.
"""

from hslake.plan.report import PlanReport
from hslake.plan.run import plan_files

__all__ = ["PlanReport", "plan_files"]
