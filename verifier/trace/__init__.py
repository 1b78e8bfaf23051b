"""The records of a run: typed events of its ranks, how each rank ended, and the numbers that rules
compare.
"""

from .rank import Ended, Trace
from .reader import Foreign, read_run
from .run import Run
from .sketches import Sketch, difference

__all__ = ["Ended", "Foreign", "Run", "Sketch", "Trace", "difference", "read_run"]
