"""Power-function averages of several lengths (as in post-hoc EMA), kept as one flat float64 vector of local shards."""
import torch


class PowerProfiles:
    def __init__(self, params, gammas):
        self.params, self.gammas, self.t = list(params), gammas, 0
        self.flat = [self._pack().clone() for _ in gammas]

    def _pack(self):
        return torch.cat([p.detach().to_local().reshape(-1) for p in self.params]).double()

    def update(self):
        self.t += 1
        now = self._pack()
        for avg, gamma in zip(self.flat, self.gammas):
            beta = (1 - 1 / self.t) ** (gamma + 1)
            avg.mul_(beta).add_(now, alpha=1 - beta)

    @torch.no_grad()
    def install(self, weights):
        """Put a linear combination of the profiles into the model; returns the trained shards."""
        kept = self._pack()
        self._unpack(sum(w * f for w, f in zip(weights, self.flat)))
        return kept

    @torch.no_grad()
    def _unpack(self, flat):
        i = 0
        for p in self.params:
            local = p.to_local()
            local.copy_(flat[i:i + local.numel()].view(local.shape))
            i += local.numel()

    put_back = _unpack
