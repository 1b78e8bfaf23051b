"""Keep the atoms of the dictionary at unit length, otherwise the sparsity penalty can be cheated."""
import torch


@torch.no_grad()
def normalize_atoms(decoder):
    w = decoder.weight.to_local()
    w.div_(w.norm(dim=0).clamp_min(1e-8))
