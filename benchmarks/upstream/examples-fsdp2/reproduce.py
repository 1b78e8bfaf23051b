"""`reproduce.py CHECKOUT/distributed/FSDP2`: which parameters `reset_parameters` leaves as
`to_empty` allocated them. No GPU is needed.
"""

import sys

import torch

sys.path.insert(0, sys.argv[1])
from model import ModelArgs, Transformer

torch.use_deterministic_algorithms(True)  # torch then fills memory that is not initialised with NaN
with torch.device("meta"):
    model = Transformer(
        ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64, dropout_p=0)
    )
model.to_empty(device="cpu")
model.reset_parameters()  # as example.py calls it
left = [name for name, param in model.named_parameters() if param.isnan().any()]
print(
    f"{len(left)} of {len(list(model.parameters()))} parameters are not initialised, such as"
    f" {left[:3]}"
)
