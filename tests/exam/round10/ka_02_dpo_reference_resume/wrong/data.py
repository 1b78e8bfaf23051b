import torch


def global_pairs(step, n, vocab, prompt=6, answer=6):
    """Preferred answers continue the prompt's arithmetic progression, rejected ones are noisy."""
    g = torch.Generator().manual_seed(90_000 + step)
    first = torch.randint(0, vocab, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    chosen = (first + stride * torch.arange(prompt + answer)) % vocab
    rejected = chosen.clone()
    noise = torch.randint(0, vocab, (n, answer), generator=g)
    keep = torch.rand(n, answer, generator=g) < 0.4
    rejected[:, prompt:] = torch.where(keep, chosen[:, prompt:], noise)
    mask = torch.zeros(n, prompt + answer)
    mask[:, prompt:] = 1.0
    return chosen, rejected, mask


def my_share(tensors, rank, world):
    return [t.chunk(world)[rank] for t in tensors]
