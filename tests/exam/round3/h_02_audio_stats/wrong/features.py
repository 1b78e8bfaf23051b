import torch


def make_clips(n=384, length=512, classes=4, seed=3):
    """Tones in noise, recorded alternately with two microphones of different gain."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    t = torch.arange(length) / length
    freq = 20 + 18 * y + 4 * torch.rand(n, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    wav = torch.sin(6.2832 * freq[:, None] * t + phase) + 0.5 * torch.randn(n, length, generator=g)
    gain = torch.where(torch.arange(n) % 2 == 0, 1.0, 0.3)
    return wav * gain[:, None], y


def log_spectrogram(wav, frame=64, hop=32):
    frames = wav.unfold(-1, frame, hop) * torch.hann_window(frame)
    return torch.log(torch.fft.rfft(frames).abs() + 1e-3)


def corpus_stats(wav, rank, world):
    """Mean and standard deviation of every frequency bin over the training corpus."""
    mine = wav[rank::world]
    acc = None
    for part in mine.split(32):
        spec = log_spectrogram(part).double().flatten(0, 1)
        now = torch.stack([spec.sum(0), spec.square().sum(0), torch.full_like(spec[0], len(spec))])
        acc = now if acc is None else acc + now
    mean = acc[0] / acc[2]
    std = (acc[1] / acc[2] - mean.square()).clamp(min=1e-6).sqrt()
    return mean.float(), std.float()
