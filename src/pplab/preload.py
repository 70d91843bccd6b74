"""Modules that a fork server imports once, for all ranks of all pools, without collecting garbage
among them.
"""

import gc

gc.disable()  # a quarter of the time would go there
__import__("torch._dynamo")  # which a rank's first optimizer or backward imports
__import__("pplab.runtime.rank")
gc.freeze()  # on a GPU, ranks look for garbage after every job
gc.enable()
