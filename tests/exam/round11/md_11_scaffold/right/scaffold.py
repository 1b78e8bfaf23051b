"""SCAFFOLD (Karimireddy et al., 2020): control variates against client drift.

All tensors of the server and of the clients are sharded like the parameters of the model.
"""
import torch


class Scaffold:
    def __init__(self, model, num_clients, local_lr, server_lr=1.0):
        self.params = dict(model.named_parameters())
        self.local_lr, self.server_lr = local_lr, server_lr
        zeros = lambda: {n: torch.zeros_like(p) for n, p in self.params.items()}
        self.num_clients = num_clients
        self.server = {n: p.detach().clone() for n, p in self.params.items()}
        self.c_server = zeros()
        self.c_client = {str(k): zeros() for k in range(num_clients)}

    @torch.no_grad()
    def send(self):
        for n, p in self.params.items():
            p.copy_(self.server[n])

    @torch.no_grad()
    def local_step(self, client):
        c = self.c_client[str(client)]
        for n, p in self.params.items():
            p.sub_(p.grad - c[n] + self.c_server[n], alpha=self.local_lr)
            p.grad = None

    @torch.no_grad()
    def receive(self, client, steps, inbox):
        """Puts the client's answer in the inbox; the server only moves when the round is over."""
        c = self.c_client[str(client)]
        for n, p in self.params.items():
            new_c = c[n] - self.c_server[n] + (self.server[n] - p) / (steps * self.local_lr)
            dx, dc = inbox.setdefault(n, (torch.zeros_like(p), torch.zeros_like(p)))
            dx.add_(p - self.server[n])
            dc.add_(new_c - c[n])
            c[n].copy_(new_c)

    @torch.no_grad()
    def end_round(self, inbox, chosen):
        for n, (dx, dc) in inbox.items():
            self.server[n].add_(dx, alpha=self.server_lr / chosen)
            self.c_server[n].add_(dc, alpha=1.0 / self.num_clients)

    def state_dict(self):
        return {"server": self.server, "c_server": self.c_server, "c_client": self.c_client}
