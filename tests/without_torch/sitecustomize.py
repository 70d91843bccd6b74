"""Every Python that finds this file is without the packages that `make book` does without."""

import sys


class Hidden:
    """Finds none of them, as if they had never been installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in {
            "torch",
            "transformers",
            "datasets",
            "pandas",
            "pyarrow",
            "ortools",
            "safetensors",
        }:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden)
