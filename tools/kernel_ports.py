"""Ports for Jupyter's kernels that the system gives nobody.

Jupyter asks the system for five free ports, lets them go and starts a kernel, which takes them half a second later.
Meanwhile the system may give one of them to somebody else, such as a rank of the tests. Then the kernel dies, and with
it the build, or the notebook (https://github.com/jupyter/jupyter_client/issues/487). So they are chosen elsewhere here.

`OwnPorts.instance()` has the kernels that this process starts from then on listen at such ports.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from jupyter_client.connect import LocalPortCache

PORTS = range(10_000, 32_768)  # Linux gives the ports above, other systems those from 49,152 on


class OwnPorts(LocalPortCache):
    """Chooses where Jupyter asks for a port."""

    def find_available_port(self, ip: str) -> int:
        """One at which nobody listens, and which no other kernel of this process was given."""
        for port in random.SystemRandom().sample(PORTS, 100):
            with socket.socket() as tried, suppress(OSError):
                tried.bind((ip, port))
                if port not in self.currently_used_ports:
                    self.currently_used_ports.add(port)
                    return port
        return super().find_available_port(ip)
