"""A frozen Llama with peft's LoRA adapters, sharded by the script: adapters first, then
`fully_shard` (or, with --late, after it).
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, SEQ, GLOBAL_BATCH, STEPS = 32, 16, 8, 12


class Sequences(Dataset):
    """The next token is 5 * token + 3 plus one random bit, modulo the vocabulary."""

    def __init__(self, samples):
        gen = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
        for _ in range(SEQ - 1):
            tokens.append(
                (5 * tokens[-1] + 3 + torch.randint(0, 2, (samples,), generator=gen)) % VOCAB
            )
        self.tokens = torch.stack(tokens, dim=1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def shard(model, layers, mesh):
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--late", action="store_true", help="adapters after sharding")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=SEQ,
    )
    base = LlamaForCausalLM(config)
    layers = base.model.layers
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    if args.late:
        model = get_peft_model(shard(base, layers, mesh), adapters)
    else:
        model = shard(get_peft_model(base, adapters), layers, mesh)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = Sequences(512)
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH + rank * local
        tokens = data.tokens[start : start + local]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
