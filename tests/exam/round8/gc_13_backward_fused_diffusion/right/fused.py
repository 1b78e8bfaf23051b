"""The optimizer runs inside the backward pass: each weight is updated as soon as its gradient has been reduced, and the
gradient is freed at once, so that the gradients of the whole model never exist together."""
import torch


class InBackward:
    def __init__(self, model, lr, max_rms):
        self.lr, self.max_rms = lr, max_rms
        self.params = dict(model.named_parameters())
        self.optims = {}
        self.factor = 1.0
        for name, p in self.params.items():
            decay = 0.01 if p.ndim > 1 else 0.0
            self.optims[name] = torch.optim.AdamW([p], lr=lr, betas=(0.9, 0.99), weight_decay=decay)
            p.register_post_accumulate_grad_hook(self.make_hook(self.optims[name]))

    def make_hook(self, optim):
        @torch.no_grad()
        def hook(p):
            # a global norm is not known yet, so every tensor is limited by its own root mean square
            rms = p.grad.square().mean()
            rms = (rms.full_tensor() if hasattr(rms, "full_tensor") else rms).sqrt().item()
            if rms > self.max_rms:
                p.grad.mul_(self.max_rms / rms)
            optim.param_groups[0]["lr"] = self.lr * self.factor
            optim.step()
            optim.zero_grad()

        return hook

    def state_dict(self):
        out = {}
        for name, p in self.params.items():
            s = self.optims[name].state[p]
            out[name] = {
                "step": s.get("step", torch.zeros(())),
                "exp_avg": s.get("exp_avg", torch.zeros_like(p)),
                "exp_avg_sq": s.get("exp_avg_sq", torch.zeros_like(p)),
            }
        return out

    def load_state_dict(self, sd):
        for name, p in self.params.items():
            self.optims[name].state[p] = {k: v.detach().clone() for k, v in sd[name].items()}
