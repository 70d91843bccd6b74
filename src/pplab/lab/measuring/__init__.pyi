# The names that the package gives, each with its home: it opens when it is asked for.

from .attribution import IDLE_PARTS as IDLE_PARTS
from .attribution import Gap as Gap
from .attribution import Where as Where
from .attribution import calibrate as calibrate
from .attribution import calibrating as calibrating
from .attribution import where as where
from .explaining import Explained as Explained
from .explaining import WhatIf as WhatIf
from .explaining import explain as explain
from .explaining_job import Cause as Cause
from .explaining_job import ExplainedJob as ExplainedJob
from .explaining_job import RankTimes as RankTimes
from .explaining_job import explain_job as explain_job
from .layers import MeasuredLayers as MeasuredLayers
from .layers import measure_layers as measure_layers
from .probe import fit_link as fit_link
from .probe import measure_link as measure_link
from .probe import message_times as message_times
from .probe import multiply_times as multiply_times
from .profiling import Profile as Profile
from .trace_file import watch_torch as watch_torch
from .traces import Traced as Traced
from .traces import read_traces as read_traces
