"""Run a command so that its processes name every action of their pipeline in the traces they
record:

    python -m pplab.watch torchrun --nproc-per-node 4 train.py

You don't have to change the program. All classes of PyTorch's pipelining get such names, and so do
Megatron-LM's schedules.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    command = sys.argv[1:]
    if not command or command[0].startswith("-"):
        sys.exit(__doc__)
    hook = str(Path(__file__).parent / "lab/measuring/watched")
    places = filter(None, (hook, os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(
            f"pplab.watch: {command[0]} doesn't start ({error.strerror}): give a command, "
            "such as torchrun --nproc-per-node 4 train.py"
        )
