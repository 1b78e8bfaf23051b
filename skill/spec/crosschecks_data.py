"""How data (chat records, whole documents, mixtures) and first weights must fit together with the
other keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading import words
from ...verifier.config.reading.validation import Fault
from . import data_content, schema
from .crosschecks import Values, fault, needs, opens_files, path_of

DRAWS = 10_000  # of the generated mixture.py: the samples in which each source has its share


@needs("data.tokenizer", "model.vocabulary", "data.kind")
@opens_files
def chat_tokenizer_fits(
    values: Values, tokenizer: str | None, found: int, kind: str
) -> Iterator[Fault]:
    if kind != "chat":
        return
    if tokenizer is None:
        yield fault(
            "data.tokenizer", "must be the folder of a tokenizer with a chat template, found null"
        )
        return
    folder = path_of(values, tokenizer)
    if message := data_content.chat_tokenizer_fault(folder):
        yield fault("data.tokenizer", f"{message}: {tokenizer!r}")
        return
    file = folder / "tokenizer.json"
    if (
        not data_content.tokenizer_fault(file)
        and (size := data_content.tokenizer_size(file)) > found
    ):
        yield fault(
            "model.vocabulary", f"must be at least {size}, the ids of data.tokenizer, found {found}"
        )


@needs("data.packing", "data.kind", "model.kind")
def model_takes_positions(
    values: Values, packing: bool | str, kind: str, model: str
) -> Iterator[Fault]:
    masked = packing == "documents" or (kind == "chat" and packing is True)
    shown = f"{packing!r}" if isinstance(packing, str) else "true"
    if masked and model == "import":
        message = (
            "must be false for model.kind import (positions that restart are for models of the"
            f" scaffold), found {shown}"
        )
        yield fault("data.packing", message)


@needs("data.packing", "data.too_long", "data.kind")
def too_long_is_for_documents(
    values: Values, packing: bool | str, too_long: str, kind: str
) -> Iterator[Fault]:
    if packing is True and kind != "chat" and not values.is_default("data.too_long"):
        yield fault(
            "data.too_long",
            "does nothing with data.packing: true, where documents are cut into samples",
        )


@needs("data.files", "data.mixture")
def files_or_a_mixture(
    values: Values, files: list[str], mixture: list[dict[str, Any]]
) -> Iterator[Fault]:
    if files and mixture:
        yield fault(
            "data.mixture", "must be left out beside data.files: write one of the two", on_key=True
        )
    elif not files and not mixture:
        message = (
            f"missing key 'files' in data{words.wanted('files', schema.at(('data', 'files')))}"
        )
        yield Fault(("data", "files"), message, ("data",), on_key=True)


@needs("data.mixture")
def sources_can_be_drawn(values: Values, mixture: list[dict[str, Any]]) -> Iterator[Fault]:
    names, total = (
        [source["name"] for source in mixture],
        sum(source["weight"] for source in mixture),
    )
    for number, source in enumerate(mixture):
        if source["name"] in names[:number]:
            yield fault(
                "data.mixture",
                f"must be another one: two sources are called {source['name']!r}",
                number,
                "name",
            )
        if source["weight"] * DRAWS < total:
            message = (
                f"must be at least 1/{DRAWS} of the sum of all weights, {total:g}, found"
                f" {source['weight']}"
            )
            yield fault("data.mixture", message, number, "weight")


@needs("data.validation", "data.validation_fraction")
def validation_has_one_source(values: Values, validation: Any, fraction: float) -> Iterator[Fault]:
    if validation is not None and not values.is_default("data.validation_fraction"):
        yield fault(
            "data.validation_fraction",
            "does nothing with data.validation: all of data.files is trained on",
        )


@needs("train.init_from", "model.kind")
@opens_files
def weights_can_be_loaded(values: Values, name: str | None, kind: str) -> Iterator[Fault]:
    if name is None:
        return
    folder = path_of(values, name)
    of_run, of_transformers = (folder / ".metadata").is_file(), any(folder.glob("*.safetensors"))
    if of_transformers and not of_run and kind == "import":
        message = (
            "holds weights of transformers, which model.kind: transformers and decoder can load:"
            f" {name!r}"
        )
        yield fault("train.init_from", message)
    elif not of_run and not of_transformers:
        newest = sorted(
            [*folder.glob("checkpoints/step_*"), *folder.glob("run-*/checkpoints/step_*")]
        )
        hint = f"; did you mean {str(newest[-1])!r}?" if newest else ""
        yield fault(
            "train.init_from", f"is no checkpoint (a folder with .metadata): {name!r}{hint}"
        )


@needs("train.init_from", "model.pretrained")
def weights_have_one_origin(
    values: Values, name: str | None, pretrained: str | None
) -> Iterator[Fault]:
    if name is not None and pretrained is not None:
        message = (
            "cannot be beside model.pretrained, which has the first weights; give its folder as"
            " model.config instead"
        )
        yield fault("train.init_from", message)
