"""A deep equilibrium model: the hidden state is the fixed point z = f(z, x), differentiated implicitly."""
import torch
import torch.nn as nn


class EquilibriumCell(nn.Module):
    def __init__(self, dim, bound=0.9):
        super().__init__()
        self.bound = bound
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, z, inject):
        # the Frobenius norm bounds the Lipschitz constant, so that the iteration contracts
        w = self.weight * (self.bound / self.weight.norm()).clamp(max=1.0)
        return torch.tanh(z @ w.t() + inject + self.bias)


class DEQ(nn.Module):
    def __init__(self, n_in, dim=40, n_out=1, forward_iters=25, backward_iters=25):
        super().__init__()
        self.inject = nn.Linear(n_in, dim)
        self.cell = EquilibriumCell(dim)
        self.readout = nn.Linear(dim, n_out)
        self.forward_iters, self.backward_iters = forward_iters, backward_iters

    def forward(self, x):
        inject = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(inject)
            for _ in range(self.forward_iters):
                z = self.cell(z, inject)
        residual = (self.cell(z, inject).detach() - z).abs().max()
        z = self.cell(z, inject)

        if torch.is_grad_enabled():
            z0 = z.detach().requires_grad_()
            f0 = self.cell(z0, inject.detach())

            def solve(grad):
                """(I - J^T)^{-1} grad by the Neumann iteration."""
                g = grad
                for _ in range(self.backward_iters):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(solve)
        return self.readout(z), residual
