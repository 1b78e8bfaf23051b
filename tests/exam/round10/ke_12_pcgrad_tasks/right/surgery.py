import torch
import torch.distributed as dist


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class GradientSurgery:
    """PCGrad: takes from each task's gradient its component against the other tasks' gradients.

    Works on the shards of the reduced gradients; the inner products are summed over the ranks.
    """

    def __init__(self, params, seed):
        self.params = list(params)
        self.rng = torch.Generator().manual_seed(seed)
        self.conflicts = 0

    def collect(self):
        """Takes the gradients of the last backward away from the parameters."""
        out = []
        for p in self.params:
            out.append(torch.zeros_like(local(p)) if p.grad is None else local(p.grad).clone())
            p.grad = None
        return out

    @staticmethod
    def _gram(vectors):
        gram = torch.stack([torch.stack([sum((a * b).sum().double() for a, b in zip(u, v)) for v in vectors]) for u in vectors])
        dist.all_reduce(gram)
        return gram

    @torch.no_grad()
    def combine(self, grads):
        k = len(grads)
        gram = self._gram(grads)
        # every projection is a linear combination of the original gradients, so the Gram matrix is all that is needed
        coef = torch.eye(k, dtype=torch.float64)
        for i in range(k):
            for j in torch.randperm(k, generator=self.rng).tolist():
                if i == j:
                    continue
                dot = coef[i] @ gram[:, j]
                if dot < 0:
                    coef[i, j] -= dot / gram[j, j]
                    self.conflicts += 1
        weights = coef.sum(0)
        for n, p in enumerate(self.params):
            p.grad = torch.zeros_like(p)
            for t in range(k):
                local(p.grad).add_(grads[t][n], alpha=weights[t].item())

    def state_dict(self):
        return {"rng": self.rng.get_state(), "conflicts": self.conflicts}

    def load_state_dict(self, state):
        self.rng.set_state(state["rng"])
        self.conflicts = state["conflicts"]
