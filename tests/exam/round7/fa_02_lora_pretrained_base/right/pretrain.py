"""Makes the pretrained base: a short run in one process on the source language."""
import torch
import torch.nn.functional as F

from model import TinyLM


def sequences(n, length, vocab, step_sizes, gen):
    """Arithmetic sequences modulo the vocabulary: the language is given by its step sizes."""
    start = torch.randint(0, vocab, (n, 1), generator=gen)
    choice = torch.randint(0, len(step_sizes), (n, 1), generator=gen)
    step = torch.tensor(step_sizes)[choice]
    return (start + step * torch.arange(length)) % vocab


def lm_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def pretrained_state(steps=150):
    torch.manual_seed(1)
    gen = torch.Generator().manual_seed(2)
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = lm_loss(model, sequences(32, 16, 32, (1, 3), gen))
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model.state_dict()
