import torch


class ChunkedLinearCE(torch.autograd.Function):
    """Cross entropy of hidden @ weight.T, summed over the tokens, with a z-loss, a few rows of logits at a time.

    The gradients are made in the forward pass, so the logits of the whole batch never exist.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target, chunk, z_weight):
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for lo in range(0, len(hidden), chunk):
            h, y = hidden[lo:lo + chunk], target[lo:lo + chunk]
            logits = h @ weight.T
            lse = torch.logsumexp(logits, 1)
            keep = (y >= 0).to(h.dtype)
            picked = logits.gather(1, y.clamp(min=0)[:, None])[:, 0]
            total += (keep * (lse - picked + z_weight * lse.square())).sum()
            # d loss / d logits
            g = torch.exp(logits - lse[:, None]) * (1 + 2 * z_weight * lse)[:, None]
            g.scatter_add_(1, y.clamp(min=0)[:, None], -torch.ones_like(lse)[:, None])
            g *= keep[:, None]
            d_hidden[lo:lo + chunk] = g @ weight
            d_weight += g.T @ h
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return grad * d_hidden, grad * d_weight, None, None, None
