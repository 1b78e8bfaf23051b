import torch
from torch.distributed.tensor import distribute_tensor


def orthogonalise(m, iterations=5):
    """Quintic Newton-Schulz iteration (Jordan et al.)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(iterations):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    """The momentum stays sharded; only the update of one matrix at a time is made whole."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "buf" not in st:
                    st["buf"] = torch.zeros_like(p)
                st["buf"].mul_(group["momentum"]).add_(p.grad)
                nesterov = p.grad.add(st["buf"], alpha=group["momentum"])
                full = orthogonalise(nesterov.full_tensor())
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(distribute_tensor(full, p.device_mesh, p.placements), alpha=-group["lr"] * scale)


class Together:
    """Drives several optimizers as if they were one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for o in self.optimizers:
            o.step()

    def set_scale(self, s):
        for o in self.optimizers:
            for g in o.param_groups:
                g["lr"] = g["base_lr"] * s


def make(model):
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("layers.")]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    muon = Muon([{"params": matrices, "base_lr": 0.03}], lr=0.03)
    adam = torch.optim.AdamW([{"params": rest, "base_lr": 5e-3}], lr=5e-3, eps=1e-5)
    return Together(muon, adam)
