"""Continue training a decoder with tied embeddings and export it in the layout of its base model."""
import argparse
import json
import logging
import os
import struct
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

logger = logging.getLogger("train")


@dataclass
class ModelArgs:
    dim: int = 24
    n_layers: int = 2
    n_heads: int = 2
    hidden: int = 64
    vocab_size: int = 32
    max_seq_len: int = 24
    enable_weight_tying: bool = True


@dataclass
class JobConfig:
    model: ModelArgs = field(default_factory=ModelArgs)
    steps: int = 24
    global_batch_size: int = 16
    lr: float = 2e-2
    warmup_steps: int = 4
    max_norm: float = 1.0
    log_freq: int = 4
    seed: int = 11


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads = args.n_heads
        self.attention_norm = nn.RMSNorm(args.dim)
        self.ffn_norm = nn.RMSNorm(args.dim)
        self.wqkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.w1 = nn.Linear(args.dim, args.hidden, bias=False)
        self.w2 = nn.Linear(args.hidden, args.dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.wqkv(self.attention_norm(x)).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))


class Decoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        nn.init.normal_(self.tok_embeddings.weight, std=0.1)
        if args.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        h = self.tok_embeddings(ids) + self.pos_embeddings.weight[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def base_weight_map(args):
    """Which file of the base release holds which tensor (its index.json)."""
    first, second = "model-00001-of-00002.tensors", "model-00002-of-00002.tensors"
    names = ["model.embed_tokens.weight", "model.embed_positions.weight"]
    for i in range(args.n_layers):
        names += [f"model.layers.{i}.{n}.weight" for n in ("input_norm", "post_norm", "attn.qkv", "attn.o", "mlp.up", "mlp.down")]
    names.append("model.norm.weight")
    return {**{n: first for n in names}, "lm_head.weight": second}


class StateDictAdapter:
    """Between the trainer's names and the release's."""

    to_release_map = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "pos_embeddings.weight": "model.embed_positions.weight",
        "layers.{}.attention_norm.weight": "model.layers.{}.input_norm.weight",
        "layers.{}.ffn_norm.weight": "model.layers.{}.post_norm.weight",
        "layers.{}.wqkv.weight": "model.layers.{}.attn.qkv.weight",
        "layers.{}.wo.weight": "model.layers.{}.attn.o.weight",
        "layers.{}.w1.weight": "model.layers.{}.mlp.up.weight",
        "layers.{}.w2.weight": "model.layers.{}.mlp.down.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }

    def __init__(self, args, weight_map):
        self.args, self.weight_map = args, weight_map

    def _abstract(self, key):
        parts = key.split(".")
        layer = next((p for p in parts if p.isdigit()), None)
        return ".".join("{}" if p.isdigit() else p for p in parts), layer

    def to_release(self, state_dict):
        out = {}
        for key, value in state_dict.items():
            name, layer = self._abstract(key)
            new_key = self.to_release_map[name].format(layer)
            if self.args.enable_weight_tying and new_key == "lm_head.weight":
                self.weight_map.pop(new_key, None)
                continue
            out[new_key] = value
        return out

    def from_release(self, tensors):
        back = {v: k for k, v in self.to_release_map.items()}
        out = {}
        for key, value in tensors.items():
            name, layer = self._abstract(key)
            out[back[name].format(layer)] = value
        if self.args.enable_weight_tying and "output.weight" not in out:
            out["output.weight"] = out["tok_embeddings.weight"]
        return out


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}


def write_shards(state_dict, weight_map):
    """The files of a release: a length, a JSON header, the tensors' bytes. Returns {file name: bytes}."""
    headers = {}
    for fqn, file_name in weight_map.items():
        headers.setdefault(file_name, {})[fqn] = {"dtype": "", "shape": [], "data_offsets": [0, 0]}
    bodies = {file_name: bytearray() for file_name in headers}
    for fqn, tensor in state_dict.items():
        body = bodies[weight_map[fqn]]
        start = len(body)
        body += tensor.contiguous().view(torch.uint8).numpy().tobytes()
        headers[weight_map[fqn]][fqn] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, len(body)],
        }
    files = {}
    for file_name, header in headers.items():
        text = json.dumps(header).encode()
        files[file_name] = struct.pack("<Q", len(text)) + text + bytes(bodies[file_name])
    return files


def read_shards(files):
    tensors = {}
    for blob in files.values():
        (length,) = struct.unpack("<Q", blob[:8])
        for fqn, info in json.loads(blob[8 : 8 + length]).items():
            start, end = (8 + length + o for o in info["data_offsets"])
            flat = torch.frombuffer(bytearray(blob[start:end]), dtype=DTYPES[info["dtype"]])
            tensors[fqn] = flat.view(info["shape"])
    return tensors


def get_batch(cfg, index):
    """Sequences over a ring of symbols; each keeps its own step, with jitter."""
    g = torch.Generator().manual_seed(cfg.seed * 7919 + index)
    n, t, v = cfg.global_batch_size, cfg.model.max_seq_len, cfg.model.vocab_size
    stride = torch.randint(1, 3, (n, 1), generator=g)
    jitter = (torch.rand(n, t + 1, generator=g) < 0.1).long()
    start = torch.randint(v, (n, 1), generator=g)
    return (start + (stride + jitter).cumsum(1)) % v


def loss_fn(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--export", default=None, help="folder for the exported files")
    parser.add_argument("--steps", type=int, default=JobConfig.steps)
    opts = parser.parse_args()
    cfg = JobConfig(steps=opts.steps)

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="[%(name)s] %(message)s")

    torch.manual_seed(cfg.seed)
    model = Decoder(cfg.model).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / cfg.warmup_steps, 1.0 - 0.9 * s / cfg.steps)
    )

    for step in range(1, cfg.steps + 1):
        ids = get_batch(cfg, step).chunk(world)[rank].to(device)
        loss = loss_fn(model, ids)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if step % cfg.log_freq == 0:
            grad_norm = grad_norm.full_tensor().item()
            logger.info(f"step: {step:3d}  loss: {mean.item() / world:.6f}  grad_norm: {grad_norm:.4f}")

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict = get_model_state_dict(model, options=options)
    if rank == 0:
        adapter = StateDictAdapter(cfg.model, base_weight_map(cfg.model))
        files = write_shards(adapter.to_release(state_dict), adapter.weight_map)
        if opts.export:
            os.makedirs(opts.export, exist_ok=True)
            for name, blob in files.items():
                with open(os.path.join(opts.export, name), "wb") as f:
                    f.write(blob)
        # read the export back the way a user of it would
        exported = Decoder(cfg.model)
        exported.load_state_dict(adapter.from_release(read_shards(files)))
        with torch.no_grad():
            val = sum(loss_fn(exported.eval(), get_batch(cfg, 5000 + i)).item() for i in range(4)) / 4
        norm = sum(p.double().square().sum().item() for p in exported.parameters()) ** 0.5
        logger.info(f"exported {len(files)} file(s): validation loss {val:.6f} weight norm {norm:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
