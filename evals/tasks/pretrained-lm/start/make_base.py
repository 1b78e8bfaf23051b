"""Writes a base model to fine-tune: python make_base.py FOLDER"""

import sys

import torch
from modeling_tiny import TinyConfig, TinyForCausalLM

torch.manual_seed(123)
base = TinyForCausalLM(TinyConfig())
for parameter in base.parameters():
    parameter.data.add_(0.02 * torch.randn_like(parameter))
base.save_pretrained(sys.argv[1])
