"""The right script from which each fault of faults.yaml is made: a wide decoder in production
settings.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, FFN, VOCABULARY = 8, 4096, 32, 14336, 128256
SEQUENCE, BATCH, ACCUMULATED, STEPS, CHUNKS = 8192, 1, 2, 2, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.up, self.down = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.empty(SEQUENCE, WIDTH), persistent=False)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.positions.to(x.dtype)
        for block in self.layers:
            x = block(x)
        parts = zip(
            self.norm(x).flatten(0, 1).chunk(CHUNKS), targets.flatten().chunk(CHUNKS), strict=True
        )
        losses = [
            checkpoint(self.part, hidden, target, use_reentrant=False) for hidden, target in parts
        ]
        return torch.stack(losses).mean()

    def part(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), target)

    def reset(self) -> None:
        angles = torch.arange(SEQUENCE, device=self.positions.device)[:, None] / torch.arange(
            1, WIDTH + 1, device=self.positions.device
        )
        self.positions.copy_(angles.sin())
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()


def main() -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))

    with torch.device("meta"):
        model = Decoder()
    for number, block in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        for _ in range(ACCUMULATED):
            tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(
                device
            )
            loss = model(tokens[:, :-1], tokens[:, 1:]) / ACCUMULATED
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    dcp.save(get_model_state_dict(model), checkpoint_id="checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
