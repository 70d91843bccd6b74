# The names that the package gives, each with its home: it opens when it is asked for.

from .attribution import IDLE_PARTS as IDLE_PARTS
from .attribution import Where as Where
from .attribution import calibrate as calibrate
from .attribution import calibrating as calibrating
from .attribution import where as where
from .explaining import Cause as Cause
from .explaining import ExplainedJob as ExplainedJob
from .explaining import explain as explain
from .hangs import explain_hang as explain_hang
from .job import TracedJob as TracedJob
from .job_reading import read_traces as read_traces
from .layers import MeasuredLayers as MeasuredLayers
from .layers import measure_layers as measure_layers
from .orders import WhatIf as WhatIf
from .probe import fit_link as fit_link
from .probe import measure_link as measure_link
from .probe import message_times as message_times
from .probe import multiply_times as multiply_times
from .profiling import Profile as Profile
from .watching import watch_megatron as watch_megatron
from .watching import watch_torch as watch_torch
