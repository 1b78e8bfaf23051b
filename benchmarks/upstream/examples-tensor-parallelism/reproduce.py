"""`reproduce.py CHECKOUT/distributed/tensor_parallelism`: the gradients with which each iteration
of its loop begins. No GPU is needed.
"""

import sys

import torch

sys.path.insert(0, sys.argv[1])
from llama2_model import ModelArgs, Transformer

torch.manual_seed(0)
model = Transformer.from_model_args(ModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=256))
model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(3):  # the loop of fsdp_tp_example.py
    held = (
        sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    )
    print(f"iteration {step} begins with gradients of norm {held:.4g}")
    torch.manual_seed(step)
    model(torch.randint(256, (8, 32))).sum().backward()
    optimizer.step()
