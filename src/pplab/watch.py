"""Run a command whose processes name every action of their pipeline in the traces they record:

    python -m pplab.watch torchrun --nproc-per-node 4 train.py

The program stays as it is. All classes of PyTorch's pipelining get names, and Megatron-LM's
schedules do, too.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    command = sys.argv[1:] or sys.exit(__doc__)
    hook = Path(__file__).parent / "lab/measuring/watched"
    os.environ["PYTHONPATH"] = f"{hook}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.execvp(command[0], command)
