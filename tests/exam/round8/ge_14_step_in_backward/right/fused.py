"""Optimizer steps inside the backward pass: each parameter is updated as soon as its reduced gradient is there."""
import torch


class BackwardAdamW:
    """One AdamW per parameter, driven by post-accumulate-grad hooks; gradients are freed at once.

    As no gradient lives until the end of the backward there is no global norm; the RMS of each
    parameter's gradient is limited instead.
    """

    def __init__(self, model, lr_at, weight_decay=0.05, max_rms=0.02):
        self.named = dict(model.named_parameters())
        self.lr_at, self.max_rms = lr_at, max_rms
        self.step_count = 0
        self.optimizers = {}
        for name, p in self.named.items():
            decay = weight_decay if p.ndim > 1 else 0.0
            optimizer = torch.optim.AdamW([p], lr=0.0, betas=(0.9, 0.95), eps=1e-6, weight_decay=decay, foreach=False)
            optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.optimizers[name] = optimizer
            p.register_post_accumulate_grad_hook(self._make_hook(optimizer))

    def _make_hook(self, optimizer):
        def hook(p):
            with torch.no_grad():
                square = p.grad.square().sum()
                if hasattr(square, "full_tensor"):
                    square = square.full_tensor()
                rms = (square / p.numel()).sqrt()
                p.grad.mul_((self.max_rms / (rms + 1e-8)).clamp(max=1.0).item())
            optimizer.param_groups[0]["lr"] = self.lr_at(self.step_count)
            optimizer.step()
            p.grad = None
        return hook

    def finish_step(self):
        assert all(p.grad is None for p in self.named.values())
        self.step_count += 1

    def state_dict(self):
        out = {"step_count": self.step_count}
        for name, p in self.named.items():
            for key, value in self.optimizers[name].state[p].items():
                out[f"{name}/{key}"] = value
        return out

    def load_state_dict(self, state):
        self.step_count = state["step_count"]
        for name, p in self.named.items():
            mine = self.optimizers[name].state[p]
            for key in mine:
                mine[key] = state[f"{name}/{key}"]
