"""Finetune a text-to-video transformer (flow matching) and export it for inference.

The text and time embeddings stay frozen; only trained parameters are exported, they are
loaded over the base model at inference.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

FRAMES, CHANNELS, PROMPTS = 6, 4, 10


class WanBlock(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.cross_value, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, text, temb):
        b, t, d = x.shape
        q, k, v = self.to_qkv(self.norm1(x + temb)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        x = x + torch.sigmoid(self.gate(self.norm2(x))) * self.cross_value(text)
        return x + self.ffn(self.norm3(x))


class WanTransformer(nn.Module):
    def __init__(self, dim=32, layers=3):
        super().__init__()
        self.text_embedder = nn.Embedding(PROMPTS, dim)
        self.time_embedder = nn.Linear(1, dim)
        self.patch_embedding = nn.Linear(CHANNELS, dim)
        self.frame_position = nn.Parameter(torch.randn(FRAMES, dim) * 0.02)
        self.blocks = nn.ModuleList(WanBlock(dim) for _ in range(layers))
        self.norm_out, self.proj_out = nn.LayerNorm(dim), nn.Linear(dim, CHANNELS)

    def forward(self, x, t, prompt):
        text = self.text_embedder(prompt)[:, None]
        temb = self.time_embedder(t[:, None])[:, None]
        h = self.patch_embedding(x) + self.frame_position
        for block in self.blocks:
            h = block(h, text, temb)
        return self.proj_out(self.norm_out(h))


def base_model(seed):
    torch.manual_seed(seed)
    model = WanTransformer()
    model.text_embedder.requires_grad_(False)
    model.time_embedder.requires_grad_(False)
    return model


def apply_activation_checkpointing(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def gather_state_dict_on_cpu_rank0(model):
    """The trained parameters as full CPU tensors on rank 0 (an empty dict elsewhere)."""
    rank = dist.get_rank()
    cpu_state_dict = {}
    sharded_sd = model.state_dict()
    trained = {name.replace("_checkpoint_wrapped_module.", "") for name, p in model.named_parameters()
               if p.requires_grad}
    for name, param in sharded_sd.items():
        if name not in trained:
            continue
        if isinstance(param, DTensor):
            param = param.full_tensor()
        if rank == 0:
            cpu_state_dict[name] = param.detach().cpu().clone()
    return cpu_state_dict


def make_videos(indices, prototypes):
    """Moving patterns: one per prompt, with a little noise, and the noise and time to train with."""
    prompt, x0, noise, t = [], [], [], []
    for i in indices:
        g = torch.Generator().manual_seed(int(i))
        p = int(torch.randint(PROMPTS, (1,), generator=g))
        prompt.append(p)
        x0.append(prototypes[p] + 0.1 * torch.randn(FRAMES, CHANNELS, generator=g))
        noise.append(torch.randn(FRAMES, CHANNELS, generator=g))
        t.append(torch.rand((), generator=g))
    return torch.stack(x0), torch.stack(noise), torch.stack(t), torch.tensor(prompt)


def flow_matching_loss(model, batch):
    x0, noise, t, prompt = batch
    xt = (1 - t)[:, None, None] * x0 + t[:, None, None] * noise
    return F.mse_loss(model(xt, t, prompt), noise - x0)


@torch.no_grad()
def evaluate_export(state_dict, args, batch):
    """What inference will see: the base model with the exported weights on top."""
    model = base_model(args.seed).eval()
    model.load_state_dict(state_dict, strict=False)
    return flow_matching_loss(model, batch).item()


def save_inference_checkpoint(model, output_dir, step):
    state_dict = gather_state_dict_on_cpu_rank0(model)
    if dist.get_rank() == 0:
        folder = os.path.join(output_dir, f"checkpoint-{step}", "transformer")
        os.makedirs(folder, exist_ok=True)
        torch.save(state_dict, os.path.join(folder, "diffusion_pytorch_model.pt"))
        print(f"saved {len(state_dict)} tensors to {folder}", flush=True)
    dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-train-steps", type=int, default=30)
    p.add_argument("--train-batch-size", type=int, default=16)
    p.add_argument("--learning-rate", type=float, default=5e-3)
    p.add_argument("--weight-decay", type=float, default=1e-2)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    p.add_argument("--no-gradient-checkpointing", action="store_true")
    p.add_argument("--output-dir")
    p.add_argument("--checkpointing-steps", type=int, default=0)
    p.add_argument("--seed", type=int, default=1000)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    model = base_model(args.seed).to(device)
    if not args.no_gradient_checkpointing:
        apply_activation_checkpointing(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    trainable = [q for q in model.parameters() if q.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_train_steps)

    frames = torch.arange(FRAMES, dtype=torch.float)[None, :, None]
    g = torch.Generator().manual_seed(3)
    prototypes = torch.sin(torch.rand(PROMPTS, 1, CHANNELS, generator=g) * 6 + frames)

    for step in range(1, args.max_train_steps + 1):
        first = step * args.train_batch_size
        batch = make_videos(range(first + rank, first + args.train_batch_size, world), prototypes)
        loss = flow_matching_loss(model, [b.to(device) for b in batch])
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(trainable, args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        grad_norm = grad_norm.full_tensor().item()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} train_loss {mean.item() / world:.6f} grad_norm {grad_norm:.5f}", flush=True)
        if args.output_dir and args.checkpointing_steps and step % args.checkpointing_steps == 0:
            save_inference_checkpoint(model, args.output_dir, step)

    exported = gather_state_dict_on_cpu_rank0(model)
    if args.output_dir:
        save_inference_checkpoint(model, args.output_dir, args.max_train_steps)
    held_out = make_videos(range(1_000_000 + rank, 1_000_064, world), prototypes)
    with torch.no_grad():
        val = flow_matching_loss(model, [b.to(device) for b in held_out])
    dist.all_reduce(val)
    if rank == 0:
        export_val = evaluate_export(exported, args, make_videos(range(1_000_000, 1_000_064), prototypes))
        print(f"validation loss {val.item() / world:.6f}, with the exported weights {export_val:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
