import math

import torch


def synth(n, seed, rate=400, seconds=0.5):
    """Keywords are pairs of tones; the order of the two tones tells the word."""
    g = torch.Generator().manual_seed(seed)
    tones = torch.tensor([20.0, 35.0, 55.0])
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    y = torch.randint(0, len(pairs), (n,), generator=g)
    t = torch.arange(int(rate * seconds)) / rate
    half = len(t) // 2
    wav = torch.zeros(n, len(t))
    for i in range(n):
        a, b = pairs[int(y[i])]
        ph = 2 * math.pi * torch.rand(2, generator=g)
        wav[i, :half] = torch.sin(2 * math.pi * tones[a] * t[:half] + ph[0])
        wav[i, half:] = torch.sin(2 * math.pi * tones[b] * t[half:] + ph[1])
    return wav + 0.4 * torch.randn(wav.shape, generator=g), y


def log_spec(wav, n_fft=40, hop=20):
    spec = torch.stft(wav, n_fft, hop, window=torch.hann_window(n_fft), return_complex=True)
    return torch.log1p(spec.abs())[:, :16]
