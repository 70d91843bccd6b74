"""NCCL between ranks that share a GPU, to test the path with NCCL on a machine with one.

NCCL refuses a second rank on a GPU of the same host. If every rank gets a host name of its own (NCCL_HOSTID), NCCL
takes it for one on a different host, and messages cross by sockets. The kernels, streams and waits are then those of
several GPUs, but the speed is not. From 2.30 on, NCCL allows it by NCCL_MULTI_RANK_GPU_ENABLE=1. Its authors don't
support it before, and its guide warns that kernels of ranks on one GPU may wait for each other's turn, so use this for
tests alone. Source: NCCL's guide on environment variables, and `init.cc` and `utils.cc` of NCCL 2.28.9. `make gpu`
tries it in its part `nccl`.
"""

from __future__ import annotations

import os

from pplab.runtime import Pool, RankContext

_SHARED_GPU = (2, 30)  # from which NCCL on shares a GPU when asked to


class OneGpuPool(Pool):
    """A pool whose ranks share GPUs and still send by NCCL. Raises ValueError if they share none."""

    def __init__(self, num_ranks: int, **options: object):
        super().__init__(num_ranks, **options)
        if self.devices[0] == "cpu" or len(set(self.devices)) == num_ranks:
            where = "are on the CPU" if self.devices[0] == "cpu" else "have a GPU each"
            raise ValueError(f"OneGpuPool is for ranks that share a GPU, and these {where}: take a Pool")
        self.transport = "nccl"
        self.notes = (
            *self.notes,
            "NCCL takes ranks on one GPU for different hosts: this is for tests, no time is valid",
        )

    def _start(self, *look: object) -> object:
        ranks = super()._start(*look)
        self.run(stand_alone)  # before the first group is made
        return ranks


def environment(rank: int, version: tuple[int, ...]) -> dict[str, str]:
    """The variables with which this version of NCCL accepts a rank on a GPU that has others."""
    if version >= _SHARED_GPU:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return {"NCCL_HOSTID": f"pplab-rank-{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def stand_alone(context: RankContext) -> None:
    """On a rank, set its environment, which NCCL reads when it makes its first communicator."""
    from pplab.runtime import cuda

    os.environ.update(environment(context.rank, tuple(cuda.nccl.version())))
