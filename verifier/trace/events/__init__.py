"""One class for each kind of record: written by the probe, read by rules, built by tests.

A record is here by being in a module.
"""

from ..typed import KINDS as KINDS
from ..typed import Event as Event
from ..typed import Line as Line
from ..typed import Located as Located
from ..typed import Part as Part
from ..typed import Place as Place
from ..typed import event_from_json as event_from_json
from .capacity import *  # noqa: F403
from .checkpoint import *  # noqa: F403
from .distributed import *  # noqa: F403
from .model import *  # noqa: F403
from .script import *  # noqa: F403
from .state import *  # noqa: F403
from .training import *  # noqa: F403
