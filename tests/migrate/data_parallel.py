"""DataParallel, and batches that are drawn."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
net = nn.DataParallel(net)  # -> one process; DataParallel
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 8)
    loss = F.mse_loss(net(x), x[:, :4])  # -> batches of one process
    loss.backward()  # -> loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(net.module.state_dict(), "net.pt")  # -> .module; model.state_dict(); torch.save of the model alone
