"""What single chapters need beside the small package, in rooms: a room says at its head what it is
for, which chapters use it and what it promises. A name of a room is a name of `lab`, and its file
is opened when it is asked for. It imports `pplab`, and `pplab` never imports it.
"""

from .. import progress as _progress
from ..optional import lazily as _lazily

__all__, __getattr__, __dir__ = _lazily(__name__, __file__)


def _of_run(*run: object) -> object:
    from .forms import progress_of_run

    return progress_of_run(*run)


_progress.of_run = _of_run
