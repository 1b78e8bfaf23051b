"""TinyLM in the manner of the large model libraries: config, from_pretrained, a loss in the output."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class TinyConfig:
    vocab_size: int = 64
    hidden_size: int = 48
    num_heads: int = 4
    num_layers: int = 3
    max_positions: int = 16


@dataclass
class CausalLMOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class TinyDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_heads
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_layernorm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.fc2 = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):
        n, t, c = hidden_states.shape
        qkv = self.qkv_proj(self.input_layernorm(hidden_states)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(n, t, c)
        hidden_states = hidden_states + self.o_proj(mixed)
        return hidden_states + self.fc2(F.gelu(self.fc1(self.post_layernorm(hidden_states))))


class TinyModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.layers = nn.ModuleList(TinyDecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class TinyForCausalLM(nn.Module):
    _no_split_modules = ("TinyDecoderLayer",)

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        """labels are input_ids; they are shifted here."""
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return CausalLMOutput(None, logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits)

    @classmethod
    def from_pretrained(cls, folder):
        model = cls(TinyConfig(**json.loads((Path(folder) / "config.json").read_text())))
        model.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))
        return model

    def save_pretrained(self, folder, state_dict=None):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(asdict(self.config)))
        torch.save(state_dict or self.state_dict(), Path(folder) / "model.pt")
