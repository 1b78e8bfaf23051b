"""The steps before a window: they are made and counted, and nothing of them is recorded."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..dispatcher import Call
from ..optimizer_ids import Turns
from ..session import Session
from .backward import BACKWARD


class SkippedSteps:
    """Counts steps as the survey run does, from the first `fully_shard` on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.optimizers = Turns(session.request.in_phases)
        self.backwards = 0  # since the last step
        self.sharded = False

    def sharding(self, call: Call) -> None:
        """`fully_shard` is about to be applied: what was trained until now is another model."""
        if not self.sharded:
            self.sharded, self.optimizers = True, Turns(self.session.request.in_phases)
            self.backwards = 0

    def backward(self, call: Call) -> None:
        """A backward has ended: a step in a script without an optimizer of torch. Its update comes
        before the next forward, which is recorded.
        """
        self.backwards += 1
        session = self.session
        if session.dormant and not session.progress.optimizers.of_torch:
            session.dormant = self.backwards < session.request.skip_steps

    def stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        session = self.session
        # A helper that only creates state follows no backward; the second optimizer of a step may.
        if not session.dormant or not (self.backwards or self.optimizers):
            return
        turn = self.optimizers.at_step(
            optimizer, session.frames.lines(), trained=self.backwards > 0
        )
        turn.begun += 1
        self.backwards = 0
        session.dormant = self.optimizers.begun < session.request.skip_steps


def install(session: Session) -> None:
    """Count, where the request leaves steps out."""
    if not session.dormant:
        return
    skipped = SkippedSteps(session)
    session.around("torch.distributed.fsdp:fully_shard", before=skipped.sharding)
    session.around(BACKWARD, after=skipped.backward)
    register_optimizer_step_post_hook(session.guarded(skipped.stepped))
