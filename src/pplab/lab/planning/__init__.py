"""From a model and machines to layouts and bills: closed forms, parameters and bytes of a
transformer, layers cut into stages, FSDP, the running case with its ledger; and plans as what
frameworks are told.

All chapters use the formulas and the case, 6, 11 and 12 the rest. Formulas say where they hold, and
are tested against simulations.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
