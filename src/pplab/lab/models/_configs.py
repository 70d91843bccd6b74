"""Check configs of transformers before a model is made from them, because a file may contain
anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import positive_int
from ...optional import bring
from ..forms import printable
from ._cutting import check_depth
from ._families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What the number of layers is called in configs of the families.
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")

# What else says how large weights are.
_WIDTHS = (
    "hidden_size",
    "n_embd",
    "d_model",
    "dim",
    "intermediate_size",
    "hidden_dim",
    "d_ff",
    "vocab_size",
)


def checked_config(config: object) -> PreTrainedConfig:
    """A config that was given. Raises ValueError where it isn't one, or where no such model can
    exist.
    """
    if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
        expected = (
            "expected a config of transformers, a folder or a name on the hub, got a "
            f"{type(config).__name__}"
        )
        raise ValueError(
            f"{expected}. If you have a model, give its .config, for random weights, or the folder "
            "that its save_pretrained(folder) made. Or train the model itself, adapters and all "
            "(with peft its get_base_model()): models.Modules(models.cut(model, 2), batches, loss)"
        )
    _check_sizes(config.to_dict(), type(config).__name__)
    return config


def config_in(folder: str) -> PreTrainedConfig:
    """The config of a folder. Raises FileNotFoundError if there is none, and ValueError if its
    model can't be made or can't be cut.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json: give a folder with a whole model, as "
            "model.save_pretrained(folder) makes it"
        )
    try:
        said = json.loads(path.read_text())
        model_type = said.get("model_type")
    except (ValueError, AttributeError, RecursionError) as error:
        raise _not_a_config(path, error) from None
    family_of(model_type)  # its error comes first: transformers has types that can't be cut here
    _check_sizes(said, str(path))  # before transformers lists what every layer is
    auto = bring("transformers").AutoConfig
    try:
        return auto.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a field of another type, or one that doesn't go with the others
        raise _not_a_config(path, error) from None


def _check_sizes(config: Mapping[str, object], where: str) -> None:
    for name in _DEPTHS:
        if config.get(name) is not None:
            check_depth(f"{where}: {name}", config[name])
    for name in _WIDTHS:
        if config.get(name) is not None:
            positive_int(f"{where}: {name}", config[name])


def _not_a_config(path: Path, error: Exception) -> ValueError:
    said = printable(str(error), keep="\n")
    return ValueError(f"{path} isn't a config of transformers ({said}): fetch or save it again")
