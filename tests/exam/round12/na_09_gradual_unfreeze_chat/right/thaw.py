"""Gradual unfreezing: the head first, then the layers from the top, at last the embeddings."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    start: int
    parts: tuple
    lr: float


PLAN = (
    Stage(0, ("head", "final"), 1e-2),
    Stage(6, ("layers.2",), 6e-3),
    Stage(11, ("layers.1", "layers.0"), 4e-3),
    Stage(16, ("embed", "place"), 3e-3),
)


class Thawer:
    def __init__(self, model, plan=PLAN):
        self.model, self.plan, self.reached = model, plan, 0
        model.requires_grad_(False)

    def _open(self):
        stage = self.plan[self.reached]
        self.reached += 1
        params = []
        for part in stage.parts:
            module = self.model.get_submodule(part)
            module.requires_grad_(True)
            params += list(module.parameters())
        return {"params": params, "lr": stage.lr}

    def first_group(self):
        return [self._open()]

    def advance(self, opt, step):
        """Opens every stage that is due at this step."""
        while self.reached < len(self.plan) and self.plan[self.reached].start <= step:
            opt.add_param_group(self._open())
