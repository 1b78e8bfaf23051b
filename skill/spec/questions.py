"""What a valid spec is asked about: it can be meant, and seldom is. Each is a note, no problem."""

from __future__ import annotations

from collections.abc import Iterator

from ...verifier.config.reading.problems import KeyPath, dotted
from .crosschecks import Values
from .renamed import position

# above this learning rate a spec is asked whether it means it: what a step of the optimizer changes
ASKED = {
    "adamw": (0.1, "each value by about as much, whatever the gradient"),
    "adamw8bit": (0.1, "each value by about as much, whatever the gradient"),
    "schedule_free": (0.1, "each value by about as much, whatever the gradient"),
    "muon": (1.0, "each matrix by about as much, whatever the gradient"),
    "sgd": (10.0, "each value by so many times its gradient"),
}


def asked(values: Values) -> list[str]:
    """The questions, each with its place."""
    found = [*_learning_rates(values), *_adapters_of_random_weights(values)]
    return [f"{position(values.document.place(path))}: {text}" for path, text in found]


def _learning_rates(values: Values) -> Iterator[tuple[KeyPath, str]]:
    optimizer = values["optimizer"]
    most, changes = ASKED[optimizer["kind"]]
    rates: list[tuple[KeyPath, float | None]] = [(("optimizer", "lr"), optimizer["lr"])]
    rates += [
        (("optimizer", "groups", number, "lr"), group["lr"])
        for number, group in enumerate(optimizer.get("groups", ()))
    ]
    for path, rate in rates:
        if rate is not None and rate > most:
            yield (
                path,
                f"is {dotted(path)} {rate:g} meant? A step of {optimizer['kind']} changes"
                f" {changes}; usual is less than {most:g}",
            )


def _adapters_of_random_weights(values: Values) -> Iterator[tuple[KeyPath, str]]:
    model = values["model"]
    if (
        values["finetune"]["kind"] == "lora"
        and model["kind"] != "import"
        and model.get("pretrained") is None
        and values["train"]["init_from"] is None
    ):
        sources = "train.init_from"
        if model["kind"] == "transformers":
            sources = "model.pretrained or train.init_from"
        message = (
            "are adapters of random weights meant? The model has none yet, and its own are not"
            f" trained; they come from {sources}"
        )
        yield ("finetune", "kind"), message
