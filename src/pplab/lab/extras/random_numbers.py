"""The state of the random numbers of the host, and of a GPU that computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime import cuda


def random_state(device: torch.device) -> list[Tensor]:
    """The state, which `set_random_state` puts back."""
    return [torch.get_rng_state(), *([cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(device: torch.device, state: Sequence[Tensor]) -> None:
    """Let random numbers go on from a state."""
    for value, put in zip(
        state, (torch.set_rng_state, lambda x: cuda.set_rng_state(x, device)), strict=False
    ):
        put(value)


def seed_random_numbers(device: torch.device, seed: int) -> None:
    """Let random numbers begin from a seed."""
    if device.type == "cuda":
        torch.manual_seed(seed)  # the host's, too
    else:
        # the function looks for every kind of device, which takes longer
        torch.default_generator.manual_seed(seed)
