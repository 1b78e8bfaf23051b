from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    lr: float

    def loss(self, student, teacher, ids):
        with torch.no_grad():
            t_logits, t_states = teacher(ids)
        s_logits, s_states = student(ids)
        if self.name == "hidden":
            chosen = t_states[:: (len(t_states) - 1) // (len(s_states) - 1)]
            return sum(F.mse_loss(s, t) for s, t in zip(s_states, chosen))
        temperature = 2.0
        t = F.log_softmax(t_logits / temperature, -1)
        s = F.log_softmax(s_logits / temperature, -1)
        return (t.exp() * (t - s)).sum(-1).mean() * temperature ** 2

    def trained(self, name):
        """Which parameters of the student move in this phase."""
        if self.name == "hidden":
            return not name.startswith("lm.head")
        return name.startswith("lm.")


PHASES = (Phase("hidden", 8, 1e-2), Phase("logits", 8, 1e-2))
