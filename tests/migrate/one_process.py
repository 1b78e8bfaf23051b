"""One process: a loader, a scaler, a compiled model, a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    dataset = TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)  # -> DataLoader without a sampler
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model.compile(backend="eager")  # -> torch.compile of the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # -> one process; no sharding; no seed before the model
    scaler = torch.cuda.amp.GradScaler(enabled=False)  # -> GradScaler
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # -> autocast
            loss = F.cross_entropy(model(x), y)
        loss.backward()  # -> loss.backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        print(model(dataset.tensors[0]).norm())
    held = {"model": model.state_dict()}  # -> model.state_dict()
    held["optimizer"] = optimizer.state_dict()  # -> optimizer.state_dict()
    torch.save(held, "state.pt")  # -> torch.save
    torch.save(model.state_dict(), "model.pt")  # -> model.state_dict(); torch.save of the model alone
    torch.save({"vocabulary": 4}, "settings.pt")


if __name__ == "__main__":
    main()
