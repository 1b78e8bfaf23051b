"""Outer optimizer of the federated rounds: Nesterov momentum on the averaged movement of the clients."""
import torch


class OuterNesterov:
    def __init__(self, named_params, lr=0.8, momentum=0.8):
        self.params = dict(named_params)
        self.lr, self.momentum = lr, momentum
        self.anchor = {n: p.detach().clone() for n, p in self.params.items()}
        self.buf = {n: torch.zeros_like(p) for n, p in self.params.items()}
        self.delta = {n: torch.zeros_like(p) for n, p in self.params.items()}

    @torch.no_grad()
    def collect(self, weight):
        """Adds a client's movement to the round and puts the weights of the server back."""
        for n, p in self.params.items():
            self.delta[n].add_(self.anchor[n] - p, alpha=weight)
            p.copy_(self.anchor[n])

    @torch.no_grad()
    def finish_round(self):
        for n, p in self.params.items():
            self.buf[n].mul_(self.momentum).add_(self.delta[n])
            self.anchor[n].sub_(self.delta[n] + self.momentum * self.buf[n], alpha=self.lr)
            p.copy_(self.anchor[n])
            self.delta[n].zero_()

    def state_dict(self):
        return {"buf": self.buf, "delta": self.delta}

    @torch.no_grad()
    def load_state_dict(self, state):
        for key, mine in self.state_dict().items():
            for n, t in mine.items():
                t.copy_(state[key][n])
        self.anchor = {n: p.detach().clone() for n, p in self.params.items()}
