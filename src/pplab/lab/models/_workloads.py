"""The models that have a name on the command line."""

from __future__ import annotations

from pathlib import Path

from ...errors import unknown
from ._cutting import LayeredModel
from ._distilbert import distilbert
from ._gpt import gpt
from ._mixture import mixture
from ._transformers import from_transformers

WORKLOADS = {"gpt": gpt, "distilbert": distilbert, "mixture": mixture}


def workload(name: str, **options: object) -> LayeredModel:
    """The workload of that name with its options. A folder, or a name with a slash as on the hub,
    goes to `from_transformers`. Raises ValueError with the nearest names for an unknown one.

    >>> workload("gpt", batch_size=8, source="sample", num_layers=2).name
    'GPT with 2 layers of width 128, batch 8 x 128 bytes'
    """
    if "/" in name or Path(name).is_dir():
        return from_transformers(name, **options)
    if name not in WORKLOADS:
        raise unknown("model", name, WORKLOADS)
    return WORKLOADS[name](**options)
