"""What a breach leads to: nothing, the end of the run, or a checkpoint and the end.

A save needs all ranks in the same step. The rank that finds a breach names a step that no rank has
reached, two checks ahead; all ranks look for the word at each check.
"""

from pathlib import Path

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

from .context import Context
from .journal import Breach
from .worker import Worker

STOPPED = 86  # the exit status of a run that the guard ends
WORD = "stop"


class Stopping:
    """The end of a run."""

    def __init__(self, context: Context, worker: Worker) -> None:
        self.context = context
        self._worker = worker
        self._now = False
        self._at: int | None = None

    def breach(self, breach: Breach) -> None:
        """A breach was found, in the guard's thread."""
        settings, context = self.context.settings, self.context
        if settings.on_breach == "stop":
            self._now = True
        elif settings.on_breach == "warn" or context.asked(WORD):
            return
        else:
            ahead = self.context.step // settings.every + 2
            context.ask(WORD, str(ahead * settings.every))

    def look(self, checked: bool) -> None:
        """A step has ended, in the main thread. Raises SystemExit."""
        if self._now:
            self._end("a breach")
        if self.context.settings.on_breach != "checkpoint-and-stop" or not checked:
            return
        if self._at is None and (word := self.context.asked(WORD)):
            self._at = int(word)
        if self._at is not None and self.context.step >= self._at:
            self._save()
            self._end("a breach, after a checkpoint")

    def _save(self) -> None:
        """A checkpoint of DCP beside the journal: model and optimizers, under torch's own keys."""
        scene, journal = self.context.scene, self.context.journal
        out = Path(self.context.settings.out)
        folder = out.with_name(f"{out.stem}.checkpoint-{self.context.step}")
        for number, (_, root) in enumerate(scene.roots()):
            model, optimizers = get_state_dict(root, scene.optimizers() if not number else [])
            target = folder if not number else folder / f"model{number}"
            state_dict_saver.save({"model": model, "optimizer": optimizers}, checkpoint_id=target)
        if journal.rank == 0:
            journal.say(f"step {self.context.step}: saved {folder} (keys model and optimizer)")

    def _end(self, why: str) -> None:
        self._worker.finish()
        self.context.journal.say(f"step {self.context.step}: the run ends for {why}")
        raise SystemExit(STOPPED)
