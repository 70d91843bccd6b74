"""Schedules beyond the small package: ZB-V, DualPipe and DualPipeV, building blocks that repeat
(V-Half, V-Min), pairs around an all-to-all, replicas, sequences in slices, eager 1F1B.

Chapters 4, 5 and 7 to 10 use them. Each is a schedule like the package's own: `pplab.build` knows
those with a name, and `validate` and `simulate` take all.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
