import torch

FEATS, FRAMES, CLASSES = 12, 20, 4


def recordings(step, batch):
    """Segments cut from long recordings. The label depends on the sound and on the beat, a pulse of 8 frames."""
    g = torch.Generator().manual_seed(3000 + step)
    offset = torch.randint(0, 3000, (batch, 1), generator=g)
    times = (offset + torch.arange(FRAMES)).float()
    sound = torch.randint(0, 2, (batch, FRAMES), generator=g)
    beat = ((times % 8) >= 4).long()
    feats = torch.randn(batch, FRAMES, FEATS, generator=g)
    feats[..., 0] += 3.0 * (sound * 2 - 1)
    return feats, times, sound * 2 + beat
