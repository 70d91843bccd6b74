"""Models, data and workloads to train: a small GPT, a mixture of experts, DistilBERT, whatever
transformers has as layers, and modules that you bring; reviews to train them on; tokens made from
what was trained.

Chapters 2 to 14 use them. A stage computes what the same layers of the whole model do.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
