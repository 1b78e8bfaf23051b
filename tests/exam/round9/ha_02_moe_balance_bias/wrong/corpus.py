import torch

VOCAB = 64
TOPICS = 4


def sequences(step, batch, length=20, seed=3):
    """Markov chains of several topics with own part of the vocabulary; rows are sorted by topic as a crawl would be."""
    g = torch.Generator().manual_seed(seed * 100_003 + step)
    topic = torch.arange(batch) * TOPICS // batch
    span = VOCAB // TOPICS
    state = torch.randint(0, span, (batch,), generator=g)
    rows = []
    for _ in range(length + 1):
        rows.append(topic * span + state)
        jump = torch.rand(batch, generator=g) < 0.15
        state = torch.where(jump, torch.randint(0, span, (batch,), generator=g), (state * 3 + topic + 1) % span)
    rows = torch.stack(rows, 1)
    return rows[:, :-1], rows[:, 1:]
