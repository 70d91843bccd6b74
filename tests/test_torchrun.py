"""The run under torchrun on two nodes: two launchers that know each other only by an address, as on two hosts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_two_nodes_give_the_numbers_of_one_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    out = tmp_path / "run.json"
    launcher = (
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id pplab "
        f"--rdzv-endpoint 127.0.0.1:{port}"
    )
    options = "-m pplab train --device cpu --source sample --schedule 1F1B --ranks 2 --microbatches 4 --steps 2"
    command = [sys.executable, *launcher.split(), *options.split(), "--check-gradients", "--json", str(out)]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    try:
        printed = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], printed
    data = json.loads(out.read_text())
    assert data["gradients"]["equal"] and data["peak_in_flight"] == [2, 1] and len(data["losses"]) == 2
    assert data["transport"] == "gloo"
    assert any("ranks on several hosts: each host's clock is its own" in note for note in data["notes"])
