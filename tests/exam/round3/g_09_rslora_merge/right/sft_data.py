import torch

LENGTH = 15


def conversation(index):
    """question (masked) and answer: the answer repeats the question backwards and shifted by two"""
    g = torch.Generator().manual_seed(900 + index)
    n = int(torch.randint(3, 7, (1,), generator=g))
    question = torch.randint(2, 40, (n,), generator=g)
    answer = torch.cat([(question[-1] + 2 * torch.arange(1, n + 1)) % 40, torch.tensor([1])])
    ids = torch.cat([question, torch.tensor([0]), answer])
    labels = torch.cat([torch.full((n,), -100), answer])  # already shifted by one against ids
    ids, labels = ids[:-1], labels
    fill = LENGTH - len(ids)
    return torch.nn.functional.pad(ids, (0, fill)), torch.nn.functional.pad(labels, (0, fill), value=-100)


def collate(indices):
    ids, labels = zip(*(conversation(i) for i in indices))
    return torch.stack(ids), torch.stack(labels)
