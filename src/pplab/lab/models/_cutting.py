"""Cut a model into stages: the embedding goes with the first, the head with the last, and the
layers evenly or as you choose.

Whatever the cut, stages exchange what layers exchange, which is the hidden states of shape (B, T,
C) for B samples with T tokens. On the way back it is their gradient, of the same shape:

    tokens (B, T) -> [embedding, layers] -- (B, T, C) --> [layers] -- (B, T, C) --> [layers, head]
    -> scores
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from ...errors import positive_int, shown
from ...runtime import Workload

# of a stack: the deepest published model has 1,000 (DeepNet), and each takes some ms to make
MOST_LAYERS = 1_024


class LayeredModel(Workload):
    """The common part of the course's workloads: layers between two ends, cut evenly or by `cut`.

    A subclass is a frozen dataclass with these two fields, and a `build_whole()` that gives the
    same weights at every call.
    """

    num_layers: int
    cut: tuple[int, ...] | None  # layers of each stage; evenly when None

    def check(self, num_stages: int) -> None:
        """Raise ValueError when there are more stages than layers, or when `cut` is for a different
        number of stages.
        """
        check_layers(self.num_layers, num_stages, self.cut)

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Build one stage, with the weights that the whole model has there."""
        return cut(self.build_whole(), num_stages, self.cut)[stage]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the layers, in order."""
        return tuple(f"layer {layer}" for layer in range(self.num_layers))

    def stage_bytes(self, num_stages: int) -> tuple[int, ...]:
        """Bytes of every stage's weights."""
        return tuple(map(weights_of, cut(self.build_whole(), num_stages, self.cut)))

    @property
    def cut_in_words(self) -> str:
        """`cut` in words, or "" without one."""
        return f" cut {'+'.join(map(str, self.cut))}" if self.cut else ""


def weights_of(module: nn.Module) -> int:
    """Bytes of a module's weights."""
    return sum(p.nbytes for p in module.parameters())


def check_depth(name: str, value: object) -> None:
    """Raise ValueError, which names the field, unless a model can have so many layers."""
    if type(value) is not int or not 1 <= value <= MOST_LAYERS:
        raise ValueError(f"{name} must be an integer from 1 to {MOST_LAYERS:,}, got {shown(value)}")


def layer_ranges(
    num_layers: int, num_stages: int, layers: Sequence[int] | None = None
) -> list[range]:
    """Contiguous layers for every stage, as many as `layers` gives, or evenly with the remainder on
    the first ones.

    >>> layer_ranges(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    >>> layer_ranges(6, 3, (1, 3, 2))
    [range(0, 1), range(1, 4), range(4, 6)]
    """
    check_layers(num_layers, num_stages, layers)
    base, more = divmod(num_layers, num_stages)
    counts = layers or [base + (stage < more) for stage in range(num_stages)]
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def check_layers(num_layers: int, num_stages: int, layers: Sequence[int] | None = None) -> None:
    """Raise ValueError when there are more stages than layers, or when `layers`, a count per stage,
    doesn't fit.

    Only the first and the last stage may have none: they hold the embedding and the head.
    """
    if layers is not None:
        _check_counts(num_layers, num_stages, tuple(layers))
    elif positive_int("num_stages", num_stages) > num_layers:
        raise ValueError(
            f"{num_layers} layers can't make {num_stages} stages: a stage needs at least one "
            "layer. Use at most "
            f"{num_layers} stages, or a deeper model"
        )


def _check_counts(num_layers: int, num_stages: int, layers: tuple[int, ...]) -> None:
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in layers):
        raise ValueError(f"cut must be whole numbers of at least 0, got {layers!r}")
    if len(layers) != positive_int("num_stages", num_stages):
        raise ValueError(
            f"cut={layers} is for {len(layers)} stages, and the schedule has {num_stages}: give "
            "one count per stage"
        )
    if sum(layers) != num_layers:
        raise ValueError(
            f"cut={layers} places {sum(layers)} layers, and the model has {num_layers}"
        )
    if 0 in layers[1:-1]:
        raise ValueError(
            f"stage {layers.index(0, 1)} of cut={layers} would be empty: only the first stage, "
            "which has the embedding, and the last, which has the head, may have no layer"
        )


def cut(model: nn.Module, num_stages: int, layers: Sequence[int] | None = None) -> list[nn.Module]:
    """Cut `model` into stages that share its parameters and keep their names.

    `layers` gives the number of layers of each stage. By default they are cut evenly.

    `models.Modules(cut(model, 2), batches, loss)` trains a model that you already have.

    The first stage takes the model's inputs, every other one takes the previous stage's output, and
    the last one returns the model's output. It cuts pplab's GPT, nn.Sequential and models of
    transformers (`from_transformers` lists them). Raises ValueError for any other model, and for
    more stages than layers.

    >>> [len(stage) for stage in cut(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), 2)]
    [2, 1]
    """
    from ._gpt import GPT  # here, since what trains it is a LayeredModel

    if isinstance(model, GPT):
        ranges = layer_ranges(len(model.blocks), num_stages, layers)
        return [model.part(r, i == 0, i == num_stages - 1) for i, r in enumerate(ranges)]
    if isinstance(model, nn.Sequential):
        children = list(model._modules.items())  # a layer that stands here twice, twice
        return [
            _named(children[r.start : r.stop])
            for r in layer_ranges(len(children), num_stages, layers)
        ]
    from ._families import FAMILIES, parts

    known = [family.model for family in FAMILIES.values()]
    if type(model).__name__ in known:
        return list(parts(model, num_stages, layers))
    raise ValueError(
        f"don't know how to cut a {type(model).__name__}: pplab cuts GPT, nn.Sequential and "
        "transformers' "
        f"{', '.join(known)}, adapters and all (with peft's the model of get_base_model()). For "
        "another model make the stages yourself and pass models.Modules([stage0, stage1, ...])"
    )


def _named(children: list[tuple[str, nn.Module]]) -> nn.Sequential:
    stage = nn.Sequential()
    for name, module in children:
        stage.add_module(name, module)
    return stage
