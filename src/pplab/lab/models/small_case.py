"""The running case at a laptop's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..extras import Budget
from . import LanguageModel, gpt


@dataclass(frozen=True)
class SmallCase:
    """The case at a thousandth of its size, which a laptop trains: a GPT of 7.8 million parameters
    on cards of 80 megabytes.

    It has the case's proportions, so the same things fit. It computes in fp32, so weights,
    gradients and Adam's state take 16 bytes per parameter. Its loss isn't computed in chunks, so on
    the last rank a microbatch keeps a quarter more.
    """

    num_layers: int = 32
    width: int = 132
    context: int = 128
    num_heads: int = 4
    vocabulary: int = 4096
    memory_mb: float = 80

    def workload(
        self, num_microbatches: int, *, cut: Sequence[int] | None = None, source: str = "auto"
    ) -> LanguageModel:
        """The model, with a sequence per microbatch. `source` is that of
        `pplab.lab.data.reviews`.
        """
        sizes = {
            name: getattr(self, name)
            for name in ("num_layers", "width", "context", "num_heads", "vocabulary")
        }
        return gpt(batch_size=num_microbatches, source=source, cut=cut, **sizes)

    @property
    def budget(self) -> Budget:
        """The card's memory, as an extra of a run."""
        return Budget(self.memory_mb * 1e6)
