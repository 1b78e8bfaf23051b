"""Stage one: a denoising autoencoder, small enough for one process."""
import torch
import torch.nn as nn


def images(n, seed):
    """8x8 pictures of two crossing bars with noise; the label is the row of the horizontal bar."""
    g = torch.Generator().manual_seed(seed)
    row = torch.randint(0, 8, (n,), generator=g)
    col = torch.randint(0, 8, (n,), generator=g)
    x = 0.5 * torch.randn(n, 8, 8, generator=g)
    x[torch.arange(n), row] += 1.0
    x[torch.arange(n), :, col] += 1.0
    return x.flatten(1), row


def encoder():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU())


def pretrain(steps=60):
    torch.manual_seed(21)
    enc, dec = encoder(), nn.Linear(32, 64)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=5e-3)
    for step in range(steps):
        clean, _ = images(64, 700 + step)
        noisy = clean + 0.3 * torch.randn(clean.shape)
        loss = (dec(enc(noisy)) - clean).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return enc.state_dict()
