"""Output layer and cross entropy in one autograd function that never holds all logits at once."""
import torch


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, chunk):
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for h, t, gh in zip(hidden.split(chunk), target.split(chunk), grad_hidden.split(chunk)):
            valid = t >= 0
            logits = h @ weight.T
            logp = logits.log_softmax(dim=-1)
            picked = logp.gather(1, t.clamp(min=0)[:, None])[:, 0]
            total -= (picked * valid).sum()
            grad = logp.exp()
            grad.scatter_add_(1, t.clamp(min=0)[:, None], -torch.ones_like(picked)[:, None])
            grad *= valid[:, None]
            gh.copy_(grad @ weight)
            grad_weight += grad.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, upstream):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream, grad_weight * upstream, None, None


def chunked_cross_entropy(hidden, weight, target, chunk=32):
    """Sum over the valid positions (target >= 0)."""
    return ChunkedCrossEntropy.apply(hidden.flatten(0, 1), weight, target.flatten(), chunk)
