import torch


def captions(n, seed, vocab=20, length=5):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, 12, generator=torch.Generator().manual_seed(42))
    txt = torch.randint(vocab, (n, length), generator=g)
    img = table[txt][:, torch.randperm(length, generator=g)]
    return img + 0.3 * torch.randn(n, length, 12, generator=g), txt
