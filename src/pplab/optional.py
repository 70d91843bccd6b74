"""What plain pplab doesn't bring, and the extra that does."""

from importlib import import_module
from types import ModuleType

_RUN = (
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "datasets",
    "pyarrow",
    "safetensors",
    "tqdm",
)
EXTRA_OF = {"matplotlib": "plot", "numpy": "plot", "ortools": "prove", **dict.fromkeys(_RUN, "run")}


def bring(name: str) -> ModuleType:
    """Import a module. Where that fails for want of one that an extra brings, the error names the
    extra.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name in EXTRA_OF:
            raise ModuleNotFoundError(
                f"{name} is missing: pip install 'pplab[{EXTRA_OF[name]}]'", name=name
            ) from None
        raise
