import torch


def logs(step, size=32, longest=14):
    """Event sequences of many lengths; now and then a batch comes from a broken collector."""
    g = torch.Generator().manual_seed(step + 1)
    ids = torch.randint(1, 20, (size, longest), generator=g)
    for i in range(2, longest):
        ids[:, i] = (ids[:, i - 1] + ids[:, i - 2]) % 19 + 1
    if step % 9 == 7:
        ids[:, 2:] = 19 - (ids[:, 2:] % 2)
    lengths = torch.randint(4, longest + 1, (size,), generator=g)
    return torch.where(torch.arange(longest) < lengths[:, None], ids, torch.zeros_like(ids))
