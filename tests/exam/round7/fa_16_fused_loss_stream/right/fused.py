"""Cross entropy of a tied output layer in chunks: the logits of all tokens never exist at once. The gradients are made
during the forward pass already and only scaled in the backward pass."""
import torch


class ChunkedTiedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        total = hidden.new_zeros(())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h, t = hidden[rows], targets[rows]
            logits = h @ weight.t()
            log_z = logits.logsumexp(-1)
            total += (log_z - logits.gather(1, t[:, None]).squeeze(1)).sum()
            d = torch.exp(logits - log_z[:, None])
            d[torch.arange(len(t)), t] -= 1.0
            grad_hidden[rows] = d @ weight
            grad_weight += d.t() @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad_out):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_out, grad_weight * grad_out, None, None
