import torch

CARDS = (12, 9, 15)


def click_data(n=900):
    g = torch.Generator().manual_seed(17)
    x = torch.stack([torch.randint(0, c, (n,), generator=g) for c in CARDS], 1)
    f = [torch.randn(c, 3, generator=g) for c in CARDS]
    e = torch.stack([t[x[:, k]] for k, t in enumerate(f)], 1)
    logit = (e[:, 0] * e[:, 1]).sum(1) + (e[:, 1] * e[:, 2]).sum(1)
    y = (torch.rand(n, generator=g) < torch.sigmoid(1.5 * logit)).float()
    return (x[:700], y[:700]), (x[700:], y[700:])
