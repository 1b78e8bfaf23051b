import torch

FEATS, PHONES, UTT, REPEAT = 10, 9, 5, 3


def utterances(seed, batch):
    """Every phone (1..8, 0 is the CTC blank) sounds for three frames."""
    codes = torch.randn(PHONES, FEATS, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    phones = torch.randint(1, PHONES, (batch, UTT), generator=g)
    feats = codes[phones.repeat_interleave(REPEAT, 1)]
    return feats + 0.5 * torch.randn(feats.shape, generator=g), phones
