from ...evidence import Evidence
from ...trace.events import Overwritten
from ..base import Finding, Rule, count, some


class LoadedWeightsOverwritten(Rule):
    """The weights that a state dict brings into a model are those that its first forward reads.

    Why: an initialisation that comes after the load (`init_weights()`, `reset_parameters`, a second
    seed) replaces all of it. The training starts from random weights, its loss falls, and nothing
    says that the pretrained model or the teacher was lost.
    Wrong:
        set_model_state_dict(student, layers_of(teacher))
        student.apply(init_weights)
    Right:
        student.apply(init_weights)
        set_model_state_dict(student, layers_of(teacher))
    Fix: Initialise first and load afterwards; what is missing in the state dict keeps its initial
    values then.
    Source: huggingface/picotron#32; law L4: what is loaded is what is trained. After each
    `load_state_dict` and `set_model_state_dict` the probe keeps some elements of each shard, and
    compares them when the model is called: more than half of them have nothing to do with the new
    values.
    """

    wants = "models"

    def judge(self, evidence: Evidence) -> Finding:
        runs = [run for run in (evidence.trained, evidence.survey) if run is not None]
        for found in [record for run in runs for record in run.all(Overwritten)][:1]:
            which = (
                f"{len(found.names)} of the {count(found.of, 'parameter')} that this line loads"
                f" ({some(found.names)})"
            )
            return self.failed(
                f"{which} have other values, unlike the loaded ones, when the model is next called",
                found.at_line,
            )
        return self.passed(
            "no weights that a state dict has set were replaced before a forward read them"
        )
