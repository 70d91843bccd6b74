# The names that the package gives, each with its home: it opens when it is asked for.

from . import data as data
from ._by_step import epochs as epochs
from ._cutting import LayeredModel as LayeredModel
from ._cutting import cut as cut
from ._cutting import layer_ranges as layer_ranges
from ._cutting import weights_of as weights_of
from ._distilbert import distilbert as distilbert
from ._gpt import GPT as GPT
from ._gpt import GPTConfig as GPTConfig
from ._gpt import LanguageModel as LanguageModel
from ._gpt import gpt as gpt
from ._mixture import Mixture as Mixture
from ._mixture import MixtureConfig as MixtureConfig
from ._mixture import mixture as mixture
from ._modules import Chain as Chain
from ._modules import Modules as Modules
from ._sliced import Sliced as Sliced
from ._sliced import sliced as sliced
from ._transformers import TransformersModel as TransformersModel
from ._transformers import from_transformers as from_transformers
from ._workloads import WORKLOADS as WORKLOADS
from ._workloads import workload as workload
from .small_case import SmallCase as SmallCase
