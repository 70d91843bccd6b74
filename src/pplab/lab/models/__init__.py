"""The models of the course, as workloads for a pipeline: a small GPT, one with experts, DistilBERT and other models of
transformers, and whatever modules you bring."""

from __future__ import annotations

from pathlib import Path

from ...errors import unknown
from ...optional import bring

bring("torch")
from ._cutting import LayeredModel, cut, layer_ranges
from ._distilbert import DistilBert, distilbert
from ._gpt import GPT, GPTConfig, LanguageModel, gpt
from ._mixture import Mixture, MixtureConfig, mixture
from ._modules import Chain, Modules
from ._sliced import Sliced, sliced
from ._transformers import TransformersModel, from_transformers

WORKLOADS = {"gpt": gpt, "distilbert": distilbert, "mixture": mixture}


def workload(name: str, **options: object) -> LayeredModel:
    """The workload of that name with its options; ValueError with the nearest names when there is none. A folder, or a
    name with a slash as the hub has them, is `from_transformers`'s.

    >>> workload("gpt", batch_size=8, source="sample", num_layers=2).name
    'GPT with 2 layers of width 128, batch 8 x 128 bytes'
    """
    if "/" in name or Path(name).is_dir():
        return from_transformers(name, **options)
    if name not in WORKLOADS:
        raise unknown("model", name, WORKLOADS)
    return WORKLOADS[name](**options)


__all__ = ["GPT", "Chain", "DistilBert", "GPTConfig", "LanguageModel", "LayeredModel", "Mixture"]
__all__ += ["MixtureConfig", "Modules", "Sliced", "TransformersModel"]
__all__ += ["layer_ranges", "cut", "from_transformers", "sliced", "workload"]
__all__ += WORKLOADS
