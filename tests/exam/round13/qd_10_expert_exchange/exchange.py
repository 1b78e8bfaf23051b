import torch
import torch.distributed as dist


class AllToAll(torch.autograd.Function):
    """Rows to the ranks that own them; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx, rows, send, recv):
        ctx.send, ctx.recv = send, recv
        out = rows.new_empty(sum(recv), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.send, ctx.recv)
        return back, None, None


def exchange_counts(counts):
    """counts[e]: rows for expert e from here. Returns rows per own expert from every source rank, (world, own)."""
    world = dist.get_world_size()
    got = torch.empty_like(counts)
    dist.all_to_all_single(got, counts)
    return got.view(world, -1)
