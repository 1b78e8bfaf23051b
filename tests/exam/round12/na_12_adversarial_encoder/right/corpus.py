import torch

CONCEPTS, LANGUAGES, LENGTH = 20, 3, 8
VOCAB = CONCEPTS * LANGUAGES


def parallel_batch(step, size, salt=0):
    """Sentences in three languages with words of their own; the target is the chain of concepts."""
    g = torch.Generator().manual_seed(10_000 * (salt + 1) + step)
    concepts = torch.randint(CONCEPTS, (size, LENGTH), generator=g)
    lang = torch.randint(LANGUAGES, (size,), generator=g)
    return concepts + lang[:, None] * CONCEPTS, concepts, lang
