"""Train a NeoX language model from a flat config, convert it to the release format and score the result."""
import argparse
import dataclasses
import json
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

NEOX_CONFIG = {
    "hidden-size": 24,
    "num-layers": 2,
    "num-attention-heads": 3,
    "padded-vocab-size": 40,
    "seq-length": 24,
    "gpt-j-residual": True,
    "layernorm-epsilon": 1e-5,
    "init-std": 0.02,
    "optimizer": {"type": "Adam", "lr": 8e-3, "betas": [0.9, 0.95]},
    "train-batch-size": 16,
    "train-iters": 24,
    "eval-iters": 4,
    "seed": 77,
}


def get_key(config, key, default=None):
    """Config keys may be spelled with dashes or underscores."""
    for k in (key, key.replace("-", "_")):
        if k in config:
            return config[k]
    return default


class ParallelLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        h = get_key(cfg, "hidden-size")
        ffn = get_key(cfg, "intermediate-size", 4 * h)
        eps = get_key(cfg, "layernorm-epsilon", 1e-5)
        self.heads = get_key(cfg, "num-attention-heads")
        self.parallel = get_key(cfg, "gpt-j-residual", False)
        self.input_layernorm = nn.LayerNorm(h, eps=eps)
        self.post_attention_layernorm = nn.LayerNorm(h, eps=eps)
        self.query_key_value = nn.Linear(h, 3 * h)
        self.attn_dense = nn.Linear(h, h)
        self.dense_h_to_4h = nn.Linear(h, ffn)
        self.dense_4h_to_h = nn.Linear(ffn, h)

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.query_key_value(self.input_layernorm(x)).view(b, t, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        a = self.attn_dense(a)
        if self.parallel:
            return x + a + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))
        x = x + a
        return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))


class GPT2Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        h, v = get_key(cfg, "hidden-size"), get_key(cfg, "padded-vocab-size")
        self.word_embeddings = nn.Embedding(v, h)
        self.position_embeddings = nn.Embedding(get_key(cfg, "seq-length"), h)
        self.layers = nn.ModuleList(ParallelLayer(cfg) for _ in range(get_key(cfg, "num-layers")))
        self.norm = nn.LayerNorm(h, eps=get_key(cfg, "layernorm-epsilon", 1e-5))
        self.final_linear = nn.Linear(h, v, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=get_key(cfg, "init-std", 0.02))

    def forward(self, ids):
        x = self.word_embeddings(ids) + self.position_embeddings.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.final_linear(self.norm(x))


@dataclasses.dataclass
class ReleaseConfig:
    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    max_position_embeddings: int = 2048
    use_parallel_residual: bool = True
    layer_norm_eps: float = 1e-5


class ReleaseBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.parallel = c.num_attention_heads, c.use_parallel_residual
        self.ln_1 = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.ln_2 = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(c.hidden_size, 3 * c.hidden_size), "out": nn.Linear(c.hidden_size, c.hidden_size)}
        )
        self.mlp = nn.Sequential(
            nn.Linear(c.hidden_size, c.intermediate_size), nn.GELU(), nn.Linear(c.intermediate_size, c.hidden_size)
        )

    def forward(self, x):
        q, k, v = self.attn["qkv"](self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        a = self.attn["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + a + self.mlp(self.ln_2(x if self.parallel else x + a))


class ReleaseModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.hidden_size)
        self.wpe = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.h = nn.ModuleList(ReleaseBlock(c) for _ in range(c.num_hidden_layers))
        self.ln_f = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def create_config(cfg):
    """Release config of a training config."""
    return {
        "vocab_size": get_key(cfg, "padded-vocab-size"),
        "hidden_size": get_key(cfg, "hidden-size"),
        "num_hidden_layers": get_key(cfg, "num-layers"),
        "num_attention_heads": get_key(cfg, "num-attention-heads"),
        "intermediate_size": get_key(cfg, "intermediate-size", 4 * get_key(cfg, "hidden-size")),
        "max_position_embeddings": get_key(cfg, "seq-length"),
        "use_parallel_residual": get_key(cfg, "gpt-j-residual", False),
        "layer_norm_eps": get_key(cfg, "layernorm-epsilon", 1e-5),
    }


RENAMES = [
    ("word_embeddings.", "wte."),
    ("position_embeddings.", "wpe."),
    ("layers.", "h."),
    ("input_layernorm.", "ln_1."),
    ("post_attention_layernorm.", "ln_2."),
    ("query_key_value.", "attn.qkv."),
    ("attn_dense.", "attn.out."),
    ("dense_h_to_4h.", "mlp.0."),
    ("dense_4h_to_h.", "mlp.2."),
    ("final_linear.", "lm_head."),
]


def convert_weights(state):
    out = {}
    for name, value in state.items():
        for old, new in RENAMES:
            name = name.replace(old, new)
        out["ln_f." + name[len("norm.") :] if name.startswith("norm.") else name] = value.detach().cpu()
    return out


def make_batch(index, size, length, vocab, seed):
    """Counting sequences with a random start and stride, a few symbols replaced."""
    g = torch.Generator().manual_seed(seed * 9973 + index)
    start = torch.randint(vocab, (size, 1), generator=g)
    stride = torch.randint(1, 4, (size, 1), generator=g)
    ids = (start + stride * torch.arange(length + 1)) % vocab
    noise = torch.rand(ids.shape, generator=g) < 0.05
    return torch.where(noise, torch.randint(vocab, ids.shape, generator=g), ids)


def lm_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default=None, help="folder for config.json and weights.pt")
    args = parser.parse_args()
    cfg = NEOX_CONFIG

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(get_key(cfg, "seed"))
    model = GPT2Model(cfg).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt_cfg = get_key(cfg, "optimizer")
    optimizer = torch.optim.Adam(model.parameters(), lr=opt_cfg["lr"], betas=tuple(opt_cfg["betas"]))

    batch, length, vocab = (get_key(cfg, k) for k in ("train-batch-size", "seq-length", "padded-vocab-size"))
    mine = slice(rank * batch // world, (rank + 1) * batch // world)

    def average(value):
        dist.all_reduce(value)
        return value.item() / world

    for it in range(get_key(cfg, "train-iters")):
        loss = lm_loss(model, make_batch(it, batch, length, vocab, cfg["seed"])[mine].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = average(loss.detach().clone())
        if rank == 0 and (it + 1) % 4 == 0:
            print(f"iteration {it + 1} lm_loss {mean:.6f}", flush=True)

    weights = convert_weights(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    config = create_config(cfg)
    if args.output and rank == 0:
        os.makedirs(args.output, exist_ok=True)
        with open(os.path.join(args.output, "config.json"), "w") as f:
            json.dump(config, f, indent=2)
        torch.save(weights, os.path.join(args.output, "weights.pt"))

    with torch.device("meta"):
        release = ReleaseModel(ReleaseConfig(**config))
    release = release.to_empty(device=device)
    release.load_state_dict(weights)
    release.eval()
    trained = exported = 0.0
    with torch.no_grad():
        for i in range(get_key(cfg, "eval-iters")):
            ids = make_batch(100_000 + i, batch, length, vocab, cfg["seed"])[mine].to(device)
            trained += average(lm_loss(model, ids)) / get_key(cfg, "eval-iters")
            exported += average(lm_loss(release, ids)) / get_key(cfg, "eval-iters")
    if rank == 0:
        norm = math.sqrt(sum(w.double().square().sum().item() for w in weights.values()))
        print(f"eval: trained {trained:.6f} exported {exported:.6f} weight norm {norm:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
