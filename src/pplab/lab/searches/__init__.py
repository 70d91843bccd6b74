"""How good a schedule can get: a bound that no order undercuts, a proof by a solver, a search, and
what they recorded.

Chapters 8 and 10 use it. A problem is stated once (`Problem`); what is called optimal is proved for
it.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
