"""Caption fine-tuning of a small vision-language model (frozen vision tower, FSDP2)."""
import argparse
import inspect
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

IGNORE_INDEX = -100
NUM_SHAPES, NUM_COLORS = 6, 5
BOS, EOS = 0, 1
CAPTION_LEN = 8


class VisionTower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.patch = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.proj = nn.Linear(width, width)

    def forward(self, pixels):
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        return torch.tanh(self.proj(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class VisionLanguageModel(nn.Module):
    def __init__(self, width=32, depth=2, vocab=2 + NUM_SHAPES + NUM_COLORS):
        super().__init__()
        self.vision = VisionTower(width)
        self.connector = nn.Linear(width, width)
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Parameter(torch.zeros(16 + CAPTION_LEN, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, pixels, input_ids, labels=None, **kwargs):
        with torch.no_grad():
            image = self.vision(pixels)
        image = self.connector(image)
        x = torch.cat([image, self.embed(input_ids)], dim=1)
        x = x + self.pos[: x.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, image.size(1):])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
        return loss, logits


class CaptionDataset:
    """A coloured shape on noise, captioned by colour, shape and a number of repeats."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.shape = torch.randint(NUM_SHAPES, (size,), generator=g)
        self.color = torch.randint(NUM_COLORS, (size,), generator=g)
        self.noise = torch.randn(size, 3, 16, 16, generator=g) * 0.1
        self.prototypes = torch.randn(NUM_SHAPES * NUM_COLORS, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.shape)

    def collate(self, indices):
        shape, color = self.shape[indices], self.color[indices]
        pixels = self.prototypes[shape * NUM_COLORS + color] + self.noise[indices]
        s, c = 2 + shape, 2 + NUM_SHAPES + color
        bos, eos = torch.full_like(s, BOS), torch.full_like(s, EOS)
        ids = torch.stack([bos, c, s, c, s, c, s, eos], dim=1)
        labels = ids.clone()
        labels[:, 0] = IGNORE_INDEX
        return {"pixels": pixels, "input_ids": ids, "labels": labels}


class Trainer:
    def __init__(self, model, args, train_set, eval_set, device):
        self.model, self.args, self.device = model, args, device
        self.train_set, self.eval_set = train_set, eval_set
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(params, lr=args.learning_rate, momentum=0.9)
        warmup = max(1, int(args.warmup_ratio * args.max_steps))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / warmup) * (1 - s / args.max_steps))
        # models that take the loss arguments normalise their loss over the whole step
        forward_params = inspect.signature(type(model).forward).parameters
        self.model_accepts_loss_kwargs = "num_items_in_batch" in forward_params

    def epoch_batches(self, epoch):
        g = torch.Generator().manual_seed(self.args.seed + epoch)
        order = torch.randperm(len(self.train_set), generator=g)
        per_micro = self.args.global_batch // self.args.gradient_accumulation_steps
        for start in range(0, len(order) - per_micro + 1, per_micro):
            yield self.train_set.collate(order[start:start + per_micro][self.rank::self.world])

    def stream(self):
        epoch = 0
        while True:
            yield from self.epoch_batches(epoch)
            epoch += 1

    def get_batch_samples(self, stream):
        batches = [next(stream) for _ in range(self.args.gradient_accumulation_steps)]
        items = sum((b["labels"][:, 1:] != IGNORE_INDEX).sum() for b in batches).to(self.device)
        dist.all_reduce(items)
        return batches, items

    def compute_loss(self, inputs, num_items_in_batch):
        inputs = {k: v.to(self.device) for k, v in inputs.items()}
        if self.model_accepts_loss_kwargs:
            inputs["num_items_in_batch"] = num_items_in_batch
        loss, _ = self.model(**inputs)
        return loss

    def training_step(self, inputs, num_items_in_batch):
        loss = self.compute_loss(inputs, num_items_in_batch)
        if not self.model_accepts_loss_kwargs:
            loss = loss / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def train(self):
        stream = self.stream()
        for step in range(1, self.args.max_steps + 1):
            batches, num_items = self.get_batch_samples(stream)
            tr_loss = torch.zeros((), device=self.device)
            for i, inputs in enumerate(batches):
                self.model.set_requires_gradient_sync(i == len(batches) - 1)
                tr_loss += self.training_step(inputs, num_items)
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm).full_tensor()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if step % self.args.logging_steps == 0:
                dist.all_reduce(tr_loss)
                self.log(step=step, loss=tr_loss.item() / self.world, grad_norm=grad_norm.item(),
                         lr=self.scheduler.get_last_lr()[0])
        return self.evaluate()

    @torch.no_grad()
    def evaluate(self):
        batch = self.eval_set.collate(torch.arange(len(self.eval_set))[self.rank::self.world])
        batch = {k: v.to(self.device) for k, v in batch.items()}
        loss, logits = self.model(**batch)
        hits = (logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean()
        metrics = torch.stack([loss, hits])
        dist.all_reduce(metrics)
        return (metrics / self.world).tolist()

    def log(self, **values):
        if self.rank == 0:
            print(", ".join(f"{k}={v:.6g}" for k, v in values.items()), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--warmup-ratio", type=float, default=0.1)
    parser.add_argument("--max-grad-norm", type=float, default=5.0)
    parser.add_argument("--logging-steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(args.seed)
    model = VisionLanguageModel().to(device)
    model.vision.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    trainer = Trainer(model, args, CaptionDataset(512, seed=1), CaptionDataset(64, seed=2), device)
    eval_loss, eval_acc = trainer.train()
    trainer.log(eval_loss=eval_loss, eval_accuracy=eval_acc)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
