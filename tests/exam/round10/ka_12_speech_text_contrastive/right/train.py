import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gather import gather_rows
from model import SpeechText, batch

STEPS, BATCH, WARMUP_QUEUE = 18, 16, 3


def contrastive(model, mel, ids, rank, use_queue):
    """Loss of this rank's rows against the candidates of the global batch."""
    s, t, scale = model(mel, ids)
    all_s, all_t = gather_rows(s), gather_rows(t)
    target = torch.arange(len(s)) + rank * len(s)
    candidates = torch.cat([all_t, model.queue.clone()]) if use_queue else all_t
    speech_to_text = F.cross_entropy(scale * s @ candidates.T, target)
    text_to_speech = F.cross_entropy(scale * t @ all_s.T, target)
    return (speech_to_text + text_to_speech) / 2, all_t.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = SpeechText()
    fully_shard(model.speech)
    fully_shard(model.text)
    fully_shard(model)
    scale = [p for n, p in model.named_parameters() if n == "log_scale"]
    towers = [p for n, p in model.named_parameters() if n != "log_scale"]
    opt = torch.optim.AdamW([{"params": towers, "lr": 4e-3}, {"params": scale, "lr": 2e-2, "weight_decay": 0.0}])

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": step}

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n[4:]))
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=loaded["model"], optim_state_dict=loaded["opt"])
        step = loaded["step"]

    while step < STEPS:
        mel, ids = (x.chunk(world)[rank] for x in batch(step, BATCH))
        loss, texts = contrastive(model, mel, ids, rank, use_queue=step >= WARMUP_QUEUE)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.enqueue(texts)
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(step), checkpoint_id=os.path.join(args.out, f"step{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
