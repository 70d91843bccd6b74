"""Models, data and workloads to train: a small GPT, a mixture of experts, DistilBERT, models of
transformers that have layers, and modules that you bring; reviews to train them on; and tokens that
a trained model makes.

Chapters 2 to 14 use them. A stage computes what the same layers of the whole model compute.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
