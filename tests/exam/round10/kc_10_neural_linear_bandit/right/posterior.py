import torch
import torch.distributed as dist


class LinearPosterior:
    """Bayesian linear regression per arm on the network's features; the same on all ranks."""

    def __init__(self, arms, dim, ridge=1.0, noise=0.3):
        self.arms, self.dim, self.ridge, self.noise = arms, dim, ridge, noise
        self.reset()

    def reset(self):
        eye = torch.eye(self.dim, dtype=torch.float64) * self.ridge
        self.precision = eye.repeat(self.arms, 1, 1)
        self.moment = torch.zeros(self.arms, self.dim, dtype=torch.float64)

    def absorb(self, features, arms, rewards):
        """features, arms and rewards of this rank; the sums go over all ranks."""
        f = features.double()
        onehot = torch.nn.functional.one_hot(arms, self.arms).double()
        add_p = torch.einsum("nk,nd,ne->kde", onehot, f, f)
        add_m = torch.einsum("nk,nd,n->kd", onehot, f, rewards.double())
        flat = torch.cat([add_p.flatten(), add_m.flatten()])
        dist.all_reduce(flat)
        self.precision += flat[: add_p.numel()].view_as(add_p)
        self.moment += flat[add_p.numel() :].view_as(add_m)

    def sample_weights(self, normal):
        """Thompson sample per arm from standard normals [arms, dim]."""
        mean = torch.linalg.solve(self.precision, self.moment)
        chol = torch.linalg.cholesky(self.precision)
        spread = torch.linalg.solve_triangular(chol.mT, normal.double().unsqueeze(-1), upper=True)
        return mean + self.noise * spread.squeeze(-1)

    def state_dict(self):
        return {"precision": self.precision, "moment": self.moment}

    def load_state_dict(self, state):
        self.precision, self.moment = state["precision"], state["moment"]
