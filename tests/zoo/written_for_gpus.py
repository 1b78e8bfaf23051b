"""A GPT written for GPUs: NCCL, a device for each rank, meta initialisation, bfloat16, accumulation, clipping, DCP.

save_args: --save {checkpoint}
resume_args: --resume {checkpoint}/step4
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, SEQ, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 2
GLOBAL_BATCH, SAMPLES = 16, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self):
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


class App(Stateful):
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler, self.step = model, optimizer, scheduler, 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


def make_sequences(samples, seed=0):
    gen = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        bit = torch.randint(0, 2, (samples,), generator=gen)
        tokens.append((5 * tokens[-1] + 3 + bit) % VOCAB)
    return torch.stack(tokens, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", default="")
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(42)
    torch.cuda.manual_seed_all(42)
    with torch.device("meta"):
        model = GPT()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    app = App(model, optimizer, scheduler)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=args.resume)
    tokens = make_sequences(SAMPLES)
    local = GLOBAL_BATCH // world // 2
    start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    while app.step < args.steps:
        start_event.record()
        total = torch.zeros((), device=device)
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            start = (app.step * GLOBAL_BATCH + micro * GLOBAL_BATCH // 2 + rank * local) % SAMPLES
            batch = tokens[start : start + local].pin_memory().to(device, non_blocking=True)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        app.step += 1
        end_event.record()
        torch.cuda.synchronize()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            memory, spent = torch.cuda.max_memory_allocated() / 2**30, start_event.elapsed_time(end_event)
            print(f"step {app.step} loss {total.item():.4f} {spent:.1f} ms {memory:.2f} GiB", flush=True)
        if args.save and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=f"{args.save}/step{app.step}")
    dist.barrier(device_ids=[local_rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
