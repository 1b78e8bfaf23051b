"""Block-coordinate training: one group of parameters is trained for a few steps, then the next one.

The optimizer (and its moments) lives only as long as its group's turn."""
import torch


class BlockSchedule:
    def __init__(self, model, turn, lr):
        self.turn, self.lr = turn, lr
        self.groups = [[(f"cells.{i}.{n}", p) for n, p in cell.named_parameters()] for i, cell in enumerate(model.cells)]
        taken = {n for g in self.groups for n, _ in g}
        self.groups.append([(n, p) for n, p in model.named_parameters() if n not in taken])
        self.model = model
        self.opt = None
        self.active = -1

    def before_step(self, step):
        wanted = (step // self.turn) % len(self.groups)
        if step % self.turn == 0 or self.opt is None:
            self.activate(wanted)

    def activate(self, index):
        self.active = index
        self.opt = torch.optim.AdamW([p for _, p in self.groups[index]], lr=self.lr, eps=1e-5)

    def step(self, max_norm):
        mine = [p for _, p in self.groups[self.active]]
        norm = torch.nn.utils.clip_grad_norm_(mine, max_norm)
        self.opt.step()
        # all parameters got gradients; those of the waiting groups are thrown away
        self.model.zero_grad(set_to_none=True)
        return norm

    def state_dict(self):
        return {"active": self.active, "opt": self.opt.state_dict()}

    def load_state_dict(self, sd):
        self.activate(sd["active"])
        self.opt.load_state_dict(sd["opt"])
