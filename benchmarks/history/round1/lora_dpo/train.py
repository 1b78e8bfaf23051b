"""Direct preference optimisation of LoRA adapters on a frozen decoder (FSDP2).

    torchrun --nproc-per-node 2 train.py --steps 20 --accumulate 2
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, DIM, LAYERS = 48, 16, 24, 2
PAIRS = 8
PROMPT = 6
IGNORE = -100


class LoRALinear(nn.Module):
    def __init__(self, fan_in, fan_out, rank=4, alpha=8.0):
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out, bias=False)
        self.a = nn.Linear(fan_in, rank, bias=False)
        self.b = nn.Linear(rank, fan_out, bias=False)
        self.scale = alpha / rank
        self.enabled = True
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        y = self.base(x)
        return y + self.scale * self.b(self.a(x)) if self.enabled else y


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(DIM)
        self.qkv = LoRALinear(DIM, 3 * DIM)
        self.proj = LoRALinear(DIM, DIM)
        self.norm2 = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        h = self.tok(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))


@contextlib.contextmanager
def disable_adapter(model):
    lora = [m for m in model.modules() if isinstance(m, LoRALinear)]
    for m in lora:
        m.enabled = False
    try:
        yield
    finally:
        for m in lora:
            m.enabled = True


def preference_batch(index, rank, world, device):
    """Chosen answers count upwards from the prompt, rejected ones are random."""
    g = torch.Generator().manual_seed(4242 + index)
    start = torch.randint(VOCAB, (PAIRS, 1), generator=g)
    chosen = (start + torch.arange(SEQ)) % VOCAB
    rejected = chosen.clone()
    rejected[:, PROMPT:] = torch.randint(VOCAB, (PAIRS, SEQ - PROMPT), generator=g)
    own = slice(rank * PAIRS // world, (rank + 1) * PAIRS // world)
    ids = torch.cat([chosen[own], rejected[own]])
    labels = ids.clone()
    labels[:, :PROMPT] = IGNORE
    return ids.to(device), labels.to(device)


def sequence_log_probs(logits, labels):
    labels = labels[:, 1:]
    mask = labels != IGNORE
    logp = logits[:, :-1].log_softmax(-1)
    token = logp.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (token * mask).sum(-1)


def concatenated_forward(model, batch):
    ids, labels = batch
    half = ids.shape[0] // 2
    logits = model(ids)
    logp = sequence_log_probs(logits, labels)
    return logp[:half], logp[half:], logits[:half], logits[half:]


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    losses = -F.logsigmoid(beta * margin)
    return losses, beta * (chosen - ref_chosen).detach(), beta * (rejected - ref_rejected).detach()


def average(values, device, world):
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for v in values])
    dist.all_reduce(packed)
    return (packed / world).tolist()


def train(args, model, optimizer, scheduler, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    running_loss, num_tokens, step, t0 = 0.0, 0, 0, time.perf_counter()
    for index in range(args.steps * args.accumulate):
        batch = preference_batch(index, rank, world, device)
        num_tokens += batch[0].numel()
        policy_chosen, policy_rejected, chosen_logits, rejected_logits = concatenated_forward(model, batch)

        chosen_logits_mean = chosen_logits.detach().mean()
        rejected_logits_mean = rejected_logits.detach().mean()
        # the full logits are the largest tensors here
        del chosen_logits, rejected_logits

        with torch.no_grad(), disable_adapter(model):
            ref_chosen, ref_rejected, _, _ = concatenated_forward(model, batch)
        losses, chosen_rewards, rejected_rewards = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
        loss = losses.mean() / args.accumulate
        running_loss += loss.detach()
        loss.backward()

        if (index + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            step += 1
            shown, accuracy, margin = average(
                [
                    running_loss,
                    (chosen_rewards > rejected_rewards).float().mean(),
                    (chosen_rewards - rejected_rewards).mean(),
                ],
                device,
                world,
            )
            if rank == 0:
                print(f"step {step} loss {shown:.6f}", flush=True)
            if step % args.log_every == 0 and rank == 0:
                log_dict = {
                    "lr": optimizer.param_groups[0]["lr"],
                    "tokens_per_second_per_rank": num_tokens / (time.perf_counter() - t0),
                    "rewards/accuracies": accuracy,
                    "rewards/margins": margin,
                    "rank0/log_probs/chosen": policy_chosen.detach().mean().item(),
                    "rank0/log_probs/rejected": policy_rejected.detach().mean().item(),
                    "rank0/logits/chosen": chosen_logits_mean.item(),
                    "rank0/logits/rejected": rejected_logits_mean.item(),
                }
                print(" | ".join(f"{k} {v:.5f}" for k, v in log_dict.items()), flush=True)
            running_loss, num_tokens, t0 = 0.0, 0, time.perf_counter()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--log-every", type=int, default=5)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(1)
    model = Decoder()
    for name, p in model.named_parameters():
        p.requires_grad_(".a." in name or ".b." in name)
    model.to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=args.lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=5)

    train(args, model, optimizer, scheduler, device)
    norm = sum(p.full_tensor().square().sum() for p in adapters).sqrt()
    if dist.get_rank() == 0:
        print(f"finished, adapter norm {norm.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
