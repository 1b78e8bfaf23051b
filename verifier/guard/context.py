"""What the parts of the guard of one rank share: the run, what trains, where it is."""

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..probe.dispatcher import Dispatcher
from ..probe.frames import Frames
from ..trace.origin import is_user
from .epoch import Epoch
from .exchange import Exchange
from .journal import Breach, Journal
from .measured import Measured
from .scene import Scene
from .settings import Settings


class Context:
    """One rank of a guarded run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.scene = Scene()
        self.frames = Frames(str(Path(sys.argv[0] or ".").resolve().parent))
        self.journal = Journal(settings.out, int(os.environ.get("RANK", "0")), settings.hook)
        self.dispatcher = Dispatcher(self.journal.error)
        self.exchange: Exchange | None = None  # from the first measurement on
        self.epoch = Epoch()  # of rank 0: the samples of the current epoch
        self.base = 0  # steps before this process, of a run that was resumed
        self.made = 0  # steps in this process
        self.loads = 0  # of checkpoints, in this process
        self.began: float | None = None  # when the first step began
        self.beat = time.monotonic()  # when the training last showed a sign
        # gives what was measured to the guard's thread
        self.hand_over: Callable[[Measured], None] = lambda measured: None
        self.printed: list[Callable[[str], None]] = []  # called with what rank 0 prints and logs
        self.breached: list[Callable[[Breach], None]] = []  # called with each new breach

    @property
    def step(self) -> int:
        """The steps that the run has made, with those before a resume."""
        return self.base + self.made

    @property
    def first_check(self) -> int:
        """The step of the first check."""
        return self.base + 1

    @property
    def due(self) -> bool:
        """Whether the next step is checked."""
        return self.made == 0 or (self.step + 1) % self.settings.every == 0

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.journal.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.exchange.world if self.exchange is not None else 1

    def here(self) -> str:
        """file:line of the user's code that is running."""
        place = self.frames.here()
        return f"{os.path.relpath(place.file)}:{place.line}" if place is not None else ""

    def verify_command(self) -> str:
        """The command with which the verifier shows a fault small."""
        script = Path(sys.argv[0]).resolve()
        if not is_user(str(script)):
            return ""
        if (script.parent / "verify.yaml").exists():
            return f"fsdp2 verify {shlex.quote(os.path.relpath(script.parent))}"
        rest = ["--", *sys.argv[1:]] if sys.argv[1:] else []
        return shlex.join(["fsdp2", "verify", os.path.relpath(script), *rest])

    def ask(self, what: str, value: str) -> None:
        """Set a word that all ranks can look for."""
        if self.exchange is not None:
            self.exchange.ask(what, value)

    def asked(self, what: str) -> str:
        """The word that was set, "" if there is none."""
        return self.exchange.asked(what) if self.exchange is not None else ""

    def found(self, breach: Breach) -> None:
        """A breach: write it, and do what was asked for one."""
        if self.journal.breach(breach):
            for call in self.breached:
                call(breach)

    def guarded(self, call: Callable[..., Any]) -> Callable[..., None]:
        """A function whose error is one line, and never the script's."""

        def called(*args: Any) -> None:
            try:
                call(*args)
            except Exception as error:
                self.journal.error(getattr(call, "__qualname__", str(call)), error)

        return called
