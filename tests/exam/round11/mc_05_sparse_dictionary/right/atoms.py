"""Keep the atoms of the dictionary at unit length, otherwise the sparsity penalty can be cheated."""
import torch
import torch.distributed as dist


@torch.no_grad()
def normalize_atoms(decoder):
    w = decoder.weight.to_local()
    sq = w.square().sum(dim=0)
    dist.all_reduce(sq)
    w.div_(sq.sqrt().clamp_min(1e-8))
