import torch

VOCAB, LENGTH = 40, 16


def sample(index):
    """arithmetic progressions modulo the vocabulary, one stride per topic, with a little noise"""
    g = torch.Generator().manual_seed(index)
    start, topic = torch.randint(0, VOCAB, (2,), generator=g).tolist()
    seq = (start + (1 + topic % 3) * torch.arange(LENGTH + 1)) % VOCAB
    noise = torch.rand(LENGTH + 1, generator=g) < 0.03
    return torch.where(noise, torch.randint(0, VOCAB, (LENGTH + 1,), generator=g), seq)


def batches(first_step, global_batch, rank, world):
    step = first_step
    while True:
        ids = [sample(step * global_batch + i) for i in range(rank, global_batch, world)]
        yield torch.stack(ids)
        step += 1
