import torch
import torch.distributed as dist


class SAM:
    """Adaptive sharpness-aware minimisation with Lookahead slow weights, around any base optimizer.

    Works on the local shards; the only thing the ranks share is the norm of the perturbation.
    """

    def __init__(self, model, base, rho=0.1, lookahead_every=5, lookahead_alpha=0.5):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.base, self.rho = base, rho
        self.every, self.alpha = lookahead_every, lookahead_alpha
        self.steps = 0
        self.slow = [self._local(p).clone() for p in self.params]
        self.clean = None

    @staticmethod
    @torch.no_grad()
    def _local(t):
        return t.detach().to_local() if hasattr(t, "to_local") else t.detach()

    @torch.no_grad()
    def climb(self):
        """w -> w + rho * |w|^2 g / || |w| g ||, keeps the clean weights."""
        square = torch.zeros((), dtype=torch.float64)
        for p in self.params:
            square += (self._local(p).abs() * self._local(p.grad)).double().square().sum()
        dist.all_reduce(square)
        scale = self.rho / (square.sqrt().item() + 1e-12)
        self.clean = []
        for p in self.params:
            w = self._local(p)
            self.clean.append(w.clone())
            w.addcmul_(w.square(), self._local(p.grad), value=scale)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, w in zip(self.params, self.clean):
            self._local(p).copy_(w)
        self.clean = None
        self.base.step()
        self.base.zero_grad()
        self.steps += 1
        if self.steps % self.every == 0:
            for p, slow in zip(self.params, self.slow):
                slow.lerp_(self._local(p), self.alpha)
                self._local(p).copy_(slow)
