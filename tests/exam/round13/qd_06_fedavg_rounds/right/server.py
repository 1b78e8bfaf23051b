"""FedAvg with server momentum. The clients are visited one after the other on the same sharded model."""
import torch
import torch.nn.functional as F


def snapshot(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


@torch.no_grad()
def restore(model, tensors):
    for k, v in model.state_dict().items():
        v.copy_(tensors[k])


class Server:
    def __init__(self, model, clients, lr, momentum):
        self.model, self.clients = model, clients
        self.lr, self.momentum = lr, momentum
        self.velocity = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}

    def train_client(self, client, round_, cfg, rank, world):
        opt = torch.optim.SGD(self.model.parameters(), lr=cfg.local_lr)
        loss_sum = torch.zeros(())
        for step in range(cfg.local_steps):
            x, y = client.batch(round_, step, cfg.batch, rank, world)
            loss = F.mse_loss(self.model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            loss_sum += loss.detach()
        return loss_sum / cfg.local_steps

    def round(self, round_, cfg, rank, world):
        start = snapshot(self.model)
        total = sum(c.records for c in self.clients)
        update = {k: torch.zeros_like(v) for k, v in start.items()}
        loss = torch.zeros(())
        for client in self.clients:
            restore(self.model, start)
            loss += client.records / total * self.train_client(client, round_, cfg, rank, world)
            with torch.no_grad():
                for k, v in self.model.state_dict().items():
                    update[k].add_(v - start[k], alpha=client.records / total)
        with torch.no_grad():
            for k, v in self.velocity.items():
                v.mul_(self.momentum).add_(update[k])
            restore(self.model, {k: start[k] + self.lr * self.velocity[k] for k in start})
        return loss
