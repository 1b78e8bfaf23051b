"""Adafactor for dim-0 sharded parameters. Factored second moments for matrices, full ones for vectors."""
import torch
import torch.distributed as dist


def reduce_sum(x):
    dist.all_reduce(x)
    return x


class ShardedAdafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, decay=0.8, clip=1.0, eps=1e-12, eps_scale=1e-3):
        super().__init__(params, dict(lr=lr, decay=decay, clip=clip, eps=eps, eps_scale=eps_scale))

    @staticmethod
    def rms(local, numel):
        return (reduce_sum(local.square().sum()) / numel).sqrt()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = p.to_local(), p.grad.to_local()
                st = self.state[p]
                if not st:
                    st["step"] = 0
                    if p.ndim == 2:
                        st["row"] = torch.zeros(w.shape[0])
                        st["col"] = torch.zeros(w.shape[1])
                    else:
                        st["sq"] = torch.zeros_like(w)
                st["step"] += 1
                beta = 1.0 - st["step"] ** -group["decay"]
                sq = g.square() + group["eps"]
                if p.ndim == 2:
                    n_rows = p.shape[0]
                    col = reduce_sum(sq.sum(dim=0)) / n_rows
                    st["row"].lerp_(sq.mean(dim=1), 1 - beta)
                    st["col"].lerp_(col, 1 - beta)
                    row_mean = reduce_sum(st["row"].sum()) / n_rows
                    update = g * (st["row"] / row_mean).rsqrt()[:, None] * st["col"].rsqrt()[None, :]
                else:
                    st["sq"].lerp_(sq, 1 - beta)
                    update = g * st["sq"].rsqrt()
                update /= (self.rms(update, p.numel()) / group["clip"]).clamp(min=1.0)
                scale = self.rms(w, p.numel()).clamp(min=group["eps_scale"])
                w.add_(update * scale * -group["lr"])
