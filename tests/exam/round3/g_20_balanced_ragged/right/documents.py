import torch

VOCAB = 32


def document(index):
    g = torch.Generator().manual_seed(index + 1)
    n = int(4 + 28 * torch.rand((), generator=g) ** 3)
    a, b = torch.randint(0, VOCAB, (2,), generator=g)
    x = (a + (1 + b % 4) * torch.arange(n + 1)) % VOCAB
    return torch.where(torch.rand(n + 1, generator=g) < 0.03, torch.randint(0, VOCAB, (n + 1,), generator=g), x)


def step_documents(step, n=12):
    return [document(step * n + i) for i in range(n)]
