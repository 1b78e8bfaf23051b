import torch
import torch.nn as nn


class FieldNet(nn.Module):
    """u(x, t). The derivatives are taken inside forward, while the weights are gathered."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        sizes = [2] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.out = nn.Linear(width, 1)

    def u(self, xt):
        h = xt
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.out(h)

    def forward(self, inner, sensors):
        x = inner[:, :1].detach().requires_grad_()
        t = inner[:, 1:].detach().requires_grad_()
        u = self.u(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
        return u_t.clone(), u_xx.clone(), self.u(sensors)


class HeatEquation(nn.Module):
    """u_t = k u_xx with an unknown conductivity k."""

    def __init__(self, k=0.2):
        super().__init__()
        self.log_k = nn.Parameter(torch.tensor(k).log())

    @property
    def k(self):
        return self.log_k.exp()

    def forward(self, u_t, u_xx):
        return u_t - self.k * u_xx
