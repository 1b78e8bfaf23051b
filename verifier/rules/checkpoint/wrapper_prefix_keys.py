from ...analysis.saves import Save
from ...source.looks import SAVES, names_in, text
from ...source.values import reach
from ..base import Finding, Flow, Hits, Run, count, some
from ._saved import SaveRule, parameter_of


class WrapperPrefixKeys(SaveRule):
    """The keys of a checkpoint are the parameter names of the model, without wrapper prefixes.

    Why: `torch.compile`, activation checkpointing and DDP-like wrappers put `_orig_mod`, `_checkpoint_wrapped_module`
    or `module` into the names. A checkpoint with such keys loads only into a model that is wrapped in the same order.
    Wrong:
        model = torch.compile(model, backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Right:
        model.compile(backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Fix: Save `get_model_state_dict(model)`, whose keys have no prefixes; compile in place (`model.compile()`).
    Source: pytorch/torchtitan#2622; pytorch-image-models PR#2003; mosaicml/composer PR#2745; pytorch#124546.
    """

    kind = "save of a tensor"

    def check(self, run: Run, saves: list[Save]) -> Finding:
        for save in saves:
            tensors = [key for key, entry in save.entries.items() if entry.kind != "object"]
            prefixes = ("_orig_mod", "_checkpoint_wrapped_module")
            prefixed = {prefix: [key for key in tensors if prefix in key.split(".")] for prefix in prefixes}
            wrapped = [key for key in tensors if _module_prefix(key) and key.rpartition("module.")[2] in run.parameters]
            clean = any(parameter_of(run, key) and key not in wrapped for key in tensors)
            if not clean and not any(key.endswith("n_averaged") for key in tensors):
                prefixed["module"] = wrapped
            for prefix, keys in prefixed.items():
                if keys:
                    of_all = f"{len(keys)} of {count(len(tensors), 'key')} of the checkpoint"
                    return self.failed(f"`{prefix}` is in {of_all}: {some(keys, 1)}", save.line)
        return self.passed("no key contains a wrapper prefix")

    def detect(self, flow: Flow) -> Hits:
        """State that is saved through the compiled model and loaded into the plain one."""
        if names_in(flow, "_orig_mod"):
            return
        compiled = {id(e.result): e for e in flow.ops("torch.compile") if e.args}
        loads = [e.on for e in flow.methods("load_state_dict") if e.on is not None]
        if any(id(model) in compiled for model in loads):
            return
        for event in flow.ops("torch.save", *SAVES):
            for part in reach(event.args[0]) if event.args else ():
                made = part.event if part.kind == "made" and part.name == "state_dict" else None
                wrapped = compiled.get(id(made.on)) if made is not None else None
                if made is not None and wrapped is not None and any(model is wrapped.args[0] for model in loads):
                    yield f"{text(made.node)} has `_orig_mod.` keys and is loaded into the model before compile", made
                    break


def _module_prefix(key: str) -> bool:
    head, found, _ = key.partition("module.")
    return bool(found) and (not head or head.endswith("."))
