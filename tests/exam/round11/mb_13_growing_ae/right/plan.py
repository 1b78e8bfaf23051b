from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    top: int
    fade: int       # steps in which the new resolution is blended in
    steps: int
    lr: float
    batch: int

    @property
    def side(self):
        return 4 * 2 ** self.top


PLAN = [Phase(0, 0, 8, 1e-2, 32), Phase(1, 4, 10, 8e-3, 16), Phase(2, 6, 12, 6e-3, 16)]


def alpha(phase, i):
    return 1.0 if phase.fade == 0 else min(1.0, (i + 1) / phase.fade)
