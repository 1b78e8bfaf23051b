import torch


@torch.no_grad()
def evaluate(model, replay, seed=1234):
    """Bound on the test sequences; always the same latent noise, so that evaluations can be compared."""
    obs, act = replay.test
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(obs.shape[0], obs.shape[1], model.latent, generator=g)
    return model(obs, act, noise).item()
