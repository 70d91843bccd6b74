"""How good a schedule can get: a bound that no order beats, a proof by a solver, a search, and
recorded results.

Chapters 8 and 10 use it. You state a problem once (`Problem`), and "optimal" means that a proof
exists for that problem.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
