"""A model as a list of layers of named kinds, between an embedding and a head."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import gcd

from ...errors import positive_int
from .expert_layers import ExpertLayers
from .kinds import Kind
from .partitioning import partition


class Ends:
    """What stands around the layers: a matrix of `vocabulary` times `width` before, and one
    behind.
    """

    width: int
    sequence: int
    vocabulary: int
    tied: bool
    bytes_each: int

    @property
    def table_parameters(self) -> int:
        """Of the embedding, and as many of the head."""
        return self.vocabulary * self.width

    def head_flops(self, samples: int) -> int:
        """Of the head's forward. The embedding is a look-up."""
        return 2 * self.table_parameters * samples * self.sequence

    def weighed(self, kind: Kind, slower: float) -> float:
        """FLOPs of such a layer's forward for a sequence; those of no matrix count `slower`
        times.
        """
        return kind.flops(self.sequence) + (slower - 1) * kind.plain_flops(self.sequence)

    def boundary_bytes(self, samples: int) -> int:
        """What crosses between two layers: (samples, sequence, width) numbers."""
        return samples * self.sequence * self.width * self.bytes_each


@dataclass(frozen=True)
class Model(Ends):
    """A decoder whose layers needn't be alike. Layers of one kind have one name.

    `predictors` (MTP) are layers that predict further tokens: they stand in the last stage, behind
    the others, and each goes through the head once more. `beside`: parameters in no layer and no
    table, such as positions. All kinds that route to experts have as many. `counted` says by which
    evidence `read_config` counted it, in words; models that differ only there are equal.

    ValueError for a model without layers, and for two kinds with one name.

    >>> from pplab.lab import kinds
    >>> attention = kinds.attention(4096, heads=32, kv_heads=8, head_width=128)
    >>> def layer(n):
    ...     return Kind(f"{n} wide", (attention, kinds.mlp(4096, n, gated=True)))
    >>> narrow, wide = layer(8192), layer(16384)
    >>> model = Model((narrow,) * 8 + (wide,) * 8, width=4096, sequence=8192)
    >>> model.pattern, model.cut(2)
    ('8192 wide*8 16384 wide*8', (9, 7))
    """

    layers: tuple[Kind, ...]
    width: int
    sequence: int
    vocabulary: int = 0
    tied: bool = False
    bytes_each: int = 2
    predictors: tuple[Kind, ...] = ()
    beside: int = 0
    counted: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("width", "sequence", "bytes_each"):
            positive_int(name, getattr(self, name))
        positive_int("vocabulary", self.vocabulary, 0)
        if not self.layers or not all(isinstance(each, Kind) for each in self.every):
            raise ValueError(f"a model has layers, and each is a Kind, got {self.every!r}")
        if len({each.name for each in self.every}) < len(self.kinds):
            raise ValueError(f"kinds that differ need names that differ, got {self.pattern}")

    @property
    def num_layers(self) -> int:
        """Without predictors."""
        return len(self.layers)

    @property
    def every(self) -> tuple[Kind, ...]:
        """All layers, then the predictors."""
        return (*self.layers, *self.predictors)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Each kind once."""
        return tuple(dict.fromkeys(self.every))

    @property
    def heads(self) -> int:
        """By whose divisors tensor ranks can cut all layers."""
        return gcd(*(part.heads for kind in self.kinds for part in kind.parts)) or 1

    @cached_property
    def experts(self) -> ExpertLayers | None:
        """Its experts, on one GPU. ValueError where kinds have other numbers of them, which aren't
        planned.
        """
        found = {(kind.routed.count, kind.routed.used) for kind in self.kinds if kind.routed}
        if len(found) > 1:
            raise ValueError(
                "kinds that route to experts must have as many, of which a token uses as many, got "
                f"{found}"
            )
        return ExpertLayers(*found.pop(), 1) if found else None

    @cached_property
    def parameters(self) -> float:
        """All of them, in all experts, tables and predictors."""
        tables = (2 - self.tied) * self.table_parameters
        return sum(kind.total("parameters") for kind in self.every) + tables + self.beside

    @cached_property
    def used(self) -> float:
        """Those that a token is multiplied by: not the embedding, and for each predictor the head
        once more.
        """
        heads = 1 + len(self.predictors)
        return sum(kind.total("used") for kind in self.every) + heads * self.table_parameters

    @property
    def pattern(self) -> str:
        """The names of its layers, such as dense*3 routed*58."""
        runs = ((name, len([*same])) for name, same in groupby(kind.name for kind in self.every))
        return " ".join(f"{name}*{times}" if times > 1 else name for name, times in runs)

    @cached_property
    def _cuts(self) -> dict[tuple[int, float], tuple[int, ...]]:
        return {}

    def work(self, samples: int, slower: float = 1) -> list[float]:
        """The FLOPs of each layer's forward; those of no matrix count `Machine.slower` times."""
        return [self.weighed(kind, slower) * samples for kind in self.layers]

    def ends_work(self, samples: int, slower: float = 1) -> float:
        """The FLOPs of the head's forward, so many times, with those of predictors."""
        heads = slower * (1 + len(self.predictors)) * self.head_flops(samples)
        return heads + sum(self.weighed(kind, slower) for kind in self.predictors) * samples

    def cut(self, num_stages: int, slower: float = 1) -> tuple[int, ...]:
        """The layers of stages with equal work, the head's in the last one. ValueError for more
        stages than layers.
        """
        asked = num_stages, slower
        if asked not in self._cuts:
            work = self.work(1, slower)
            work[-1] += self.ends_work(1, slower)
            self._cuts[asked] = partition(work, num_stages)
        return self._cuts[asked]

    def long(self, experts: ExpertLayers | None) -> Model:
        """Itself. ValueError for experts that its layers don't have."""
        mine = self.experts
        if experts and (not mine or (mine.count, mine.used) != (experts.count, experts.used)):
            has = f"{mine.used} of {mine.count}" if mine else "none"
            raise ValueError(
                f"this model's layers say their experts, and a token uses {has}, got {experts}"
            )
        return self
