from collections.abc import Iterator

from ...analysis.presence import unfinished
from ...analysis.saves import all_saves
from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import names_in, text
from ...source.looks_checkpoint import SAVES
from ...source.registry import detector
from ...source.values import reach
from ..base import Rule
from ._holds import has_tensors, nothing_saved
from ._names import parameter_of


class WrapperPrefixKeys(Rule):
    """The keys of a checkpoint are the parameter names of the model, without the names of wrappers.

    Why: `torch.compile`, activation checkpointing and DDP-like wrappers put `_orig_mod`, `_checkpoint_wrapped_module` or
    `module` into the names. A checkpoint with such keys loads only into a model that is wrapped in the same order.
    Wrong:
        model = torch.compile(model, backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Right:
        model.compile(backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Fix: Compile in place (`model.compile()`), take state through `get_model_state_dict`, and strip prefixes at an export.
    Source: pytorch/torchtitan#2622; huggingface/pytorch-image-models PR#2003; mosaicml/composer PR#2745; pytorch#124546.
    """

    wants = "run"

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or nothing_saved(evidence, has_tensors, "no tensor is saved")

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        saves = [save for save in all_saves(run) if has_tensors(save)]
        if not saves:
            return self.unknown(unfinished(run) or "no save was seen")
        for save in saves:
            tensors = [key for key, entry in save.entries.items() if entry.kind != "object"]
            for word in ("_orig_mod", "_checkpoint_wrapped_module"):
                wrapped = [key for key in tensors if word in key.split(".")]
                if wrapped:
                    return self.failed(
                        f"{count(len(wrapped), 'key')} of {len(tensors)} hold `{word}` ({some(wrapped)})", save.line
                    )
            names = set(run.parameters)
            wrapped = [key for key in tensors if key.rpartition("module.")[2] in names and _leads(key, "module.")]
            clean = [key for key in tensors if parameter_of(run, key) and key not in wrapped]
            if wrapped and not clean and not any(key.endswith("n_averaged") for key in tensors):
                return self.failed(f"{count(len(wrapped), 'key')} begin with `module.` ({some(wrapped)})", save.line)
        return self.passed("no wrapper's name in any key")


def _leads(key: str, word: str) -> bool:
    head = key.partition(word)[0]
    return word in key and (not head or head.endswith("."))


@detector("wrapper-prefix-keys")
def wrapper_prefix_keys(flow: Flow) -> Iterator[Hit]:
    """Saved through the compiled model, loaded into the plain one, or the other way round."""
    compiled = {id(e.result): e for e in flow.ops("torch.compile") if e.args}
    loads = [e.on for e in flow.methods("load_state_dict") if e.on is not None]
    for event in flow.ops("torch.save", *SAVES):
        for part in reach(event.args[0]) if event.args else ():
            made = part.event if part.kind == "made" and part.name == "state_dict" else None
            wrapped = compiled.get(id(made.on)) if made is not None else None
            if made is None or wrapped is None or names_in(flow, "_orig_mod"):
                continue
            plain = any(model is wrapped.args[0] for model in loads) and not any(
                id(model) in compiled for model in loads
            )
            if plain:
                told = f"{text(made.node)} of a compiled model has keys with the prefix `_orig_mod.`; it is loaded into the plain one"
                yield flow.hit("wrapper-prefix-keys", told, made)
                break
