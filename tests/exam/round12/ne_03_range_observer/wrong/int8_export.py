import torch
import torch.distributed as dist


def fake_int8(x, scale):
    return (x / scale).round().clamp(-127, 127) * scale


@torch.no_grad()
def export(model, path=None):
    """Collects {layer: (int8 weight, weight scale per row, activation scale, bias)} and writes it on rank 0."""
    table = {}
    for name, mod in model.named_modules():
        if hasattr(mod, "observer"):
            w, b = mod.weight.full_tensor(), mod.bias.full_tensor()
            ws = w.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
            table[name] = {"q": (w / ws).round().to(torch.int8), "ws": ws, "bias": b, "as": mod.observer.amax / 127}
    if path and dist.get_rank() == 0:
        torch.save(table, path)
    return table


def run_int8(table, x):
    def layer(name, h):
        t = table[name]
        return fake_int8(h, t["as"]) @ (t["q"].float() * t["ws"]).t() + t["bias"]

    h = torch.relu(layer("inp", x))
    for name in sorted(k for k in table if k.startswith("hidden.")):
        h = h + torch.relu(layer(name, h))
    return layer("out", h)
