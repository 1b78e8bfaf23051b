from ...source.flow_queries import has_parameters, is_known, parts_of, trains
from ...trace.events import Model, Shard
from ..base import Evidence, Finding, Flow, Hits, Rule, count
from ..policies import OnlyWarns
from ._base import NOT_USED, elements


class RootOnlyWrap(Rule):
    """Repeated blocks are separate groups, not one group with the whole model.

    Why: each `fully_shard` call makes one group, gathered in one collective. With the root alone,
    every forward holds the whole unsharded model and nothing overlaps: no memory is saved. Results
    are correct: this is a warning.
    Wrong:
        fully_shard(model)
    Right:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    Fix: Call `fully_shard` on each block before the root.
    Source: the docstring of `fully_shard` ("not ... only on the topmost root module");
    huggingface/lerobot PR#4010.
    """

    wants = "models"
    # One group for a whole small model costs memory only: a warning (exam round 7
    # fa_11_sam_gradient_clip, fd_14_force_matching).
    policies = (OnlyWarns(),)
    simulated = True

    def applies(self, evidence: Evidence) -> str:
        models = evidence.trained.models
        alone = any(model.groups for model in models) and not any(model.blocks for model in models)
        return "the model has no repeated blocks" if alone else ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        if not any(model.groups for model in run.models):
            return self.unknown(NOT_USED)
        # a policy and its reference are two models, each with a root of its own (radixark/miles)
        alone = [
            (max(model.blocks, key=lambda b: b.numel), _elements(model))
            for model in run.models
            if len(model.groups) == 1 and model.blocks
        ]
        # If the repeated blocks hold less than half of the elements, groups of their own would save
        # little.
        alone = [(blocks, total) for blocks, total in alone if 2 * blocks.numel >= total]
        if not alone:
            groups = sum(len(model.groups) for model in run.models)
            elements_of_all = sum(map(_elements, run.models))
            return self.passed(
                f"{count(groups, 'group')} for {elements_of_all:,} parameter elements"
            )
        blocks, total = max(alone, key=lambda one: one[1])
        modules = (
            f"{blocks.count} modules of class {blocks.cls.rpartition('.')[2]} under"
            f" '{blocks.parent}'"
        )
        share = f"{blocks.numel / total:.0%} of them and are not sharded as separate groups"
        what = f"one group holds all {total:,} parameter elements; the {modules} hold {share}"
        return self.failed(what, run.line_of(Shard))

    def detect(self, flow: Flow) -> Hits:
        if (
            not flow.certain
            or not trains(flow)
            or len({id(module) for _, module in flow.shards}) != 1
        ):
            return
        for event, module in flow.shards:
            # Parameters that fully_shard ignores are in no group: how many are left is not known
            # from the sources (linted right scripts of the exam).
            if not is_known(flow, module) or event.loops or "ignored_params" in event.kwargs:
                continue
            for name, part in parts_of(module):
                if part.name not in ("torch.nn.ModuleList", "torch.nn.Sequential"):
                    continue
                blocks = elements(part)
                many = len(blocks) > 1 or any(a.name == "many" for a in part.event.args)
                layers = [
                    sum(has_parameters(flow, layer) for _, layer in parts_of(block))
                    for block in blocks
                ]
                if (
                    many
                    and min(layers, default=0) > 1
                    and all(block.kind == "object" for block in blocks)
                ):
                    what = f"the modules of {module.name}.{name} are not sharded as separate groups"
                    yield f"fully_shard is called on the root alone: {what}", event
                    return


def _elements(model: Model) -> int:
    """The elements of the parameters of a model."""
    return sum(entry.numel for entry in model.parameters)
