import torch


class ChunkedKD(torch.autograd.Function):
    """Projection and KL(teacher || student) in one, chunk by chunk, so that student logits of all tokens never exist.

    The gradients are computed along with the loss in the forward pass and only scaled in the backward pass.
    """

    @staticmethod
    def forward(ctx, hidden, weight, teacher_logits, keep, temperature, chunk):
        loss = hidden.new_zeros(())
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for lo in range(0, len(hidden), chunk):
            at = slice(lo, lo + chunk)
            s = (hidden[at] @ weight.T / temperature).log_softmax(-1)
            t = (teacher_logits[at] / temperature).log_softmax(-1)
            k = keep[at, None]
            loss += (k * t.exp() * (t - s)).sum() * temperature**2
            d_logits = (s.exp() - t.exp()) * k * temperature
            d_hidden[at] = d_logits @ weight
            d_weight += d_logits.T @ hidden[at]
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return grad * d_hidden, grad * d_weight, None, None, None, None
