"""What the templates see of the data: which parts a kind of data needs, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.data_files import is_url
from .literals import LINE

TITLES = {  # kind: (words, title)
    "text": ("text files", "Tokenized text"),
    "tokens": ("files of token ids", "Token files"),
    "jsonl": ("JSON lines", "Texts in JSON lines"),
    "parquet": ("Parquet files", "Texts in Parquet files"),
    "chat": ("chat records", "Chat records"),
    "datasets": ("a dataset on disk", "Texts of a dataset"),
    "images": ("folders of images", "Images by folder"),
    "import": ("data of its own", "Your own samples"),
    "synthetic": ("made-up sequences", "Made-up sequences"),
}
PARAMETERS = {
    "files": "files: Sequence[str]",
    "out": "out: Path",
    "sequence_length": "sequence_length: int",
    "vocabulary": "vocabulary: int",
}
RAW = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
PACKAGES = {
    "tokenizers": "tokenizer",
    "transformers": "chat",
    "pyarrow": "parquet",
    "datasets": "datasets",
    "pillow": "images",
}


def data_files(data: Mapping[str, Any]) -> dict[str, bool]:
    """The modules of the data, and whether each is needed."""
    return {
        "data.py": True,
        "corpus.py": has_corpus(data),
        "prepare.py": is_prepared(data),
        "remote.py": any(is_url(file) for file in _all_files(data)),
        "chat.py": data["kind"] == "chat",
        "images.py": data["kind"] == "images",
        "mixture.py": bool(data.get("mixture")),
    }


def data_context(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the template context that follows from the section `data`."""
    data, model = values["data"], values["model"]
    kind, tokenizer = data["kind"], data.get("tokenizer") is not None
    packing = data.get("packing", True)
    packed, prepared = packing is True, is_prepared(data)
    byte_text = kind == "text" and not tokenizer
    words, title = ("byte-level text", "Byte-level text") if byte_text else TITLES[kind]
    parquet = kind == "parquet" or data.get("format") == "parquet"
    used = {"tokenizer": tokenizer and kind != "chat", "parquet": parquet, kind: True}
    augment = data.get("augment", False)
    sources = _sources(data)
    return {
        **sources,
        **_signatures(data, model, sources["several"]),
        "kind": kind,
        "tokenizer": tokenizer,
        "packed": packed,
        "masked": packing == "documents",
        "chat": kind == "chat",
        "cache": data.get("cache", "tokens"),
        "parquet": parquet,
        "byte_text": byte_text,
        "as_bytes": not tokenizer and kind in ("text", "jsonl", "datasets"),
        "corpus": has_corpus(data),
        "prepared": prepared,
        "windows": packed and kind in ("text", "tokens", "jsonl", "parquet", "datasets"),
        "documents": not packed,
        "images": kind == "images",
        "augment": augment,
        # a class whose samples are drawn for their place in training
        "placed": "Augmented" if augment else "Reproducible" if kind == "import" else "",
        "dry_sample": model["sequence_length"] is None and kind == "import",
        "vocabulary_checked": _has_vocabulary(data),
        "corpus_type": "np.ndarray" if packed else "Corpus",
        "token_type": _token_type(model["vocabulary"], tokenizer),
        "raw_dtype": RAW.get(data.get("dtype", "")),
        "cache_settings": _cache_settings(data) if prepared else "",
        "data_title": title,
        "data_words": words,
        "data_packages": [package for package, key in PACKAGES.items() if used.get(key)],
    }


def _sources(data: Mapping[str, Any]) -> dict[str, Any]:
    """The files of training by their weights, and those of validation."""
    mixture, validation = data.get("mixture", []), _validation(data.get("validation"))
    return {
        "mixture": {source["name"]: source["files"] for source in mixture},
        "weights": {source["name"]: source["weight"] for source in mixture},
        "validation": validation,
        "several": bool(mixture) or validation is not None,
        "sets": _sets(data),
        "stdlib": any(file.startswith("{stdlib}") for file in _all_files(data)),
    }


def _signatures(data: Mapping[str, Any], model: Mapping[str, Any], several: bool) -> dict[str, Any]:
    """What the functions of data.py, corpus.py and prepare.py take, and what they are given."""
    kind, vocabulary = data["kind"], ["vocabulary"] * _has_vocabulary(data)
    load = ["out"] * (kind in ("tokens", "images"))
    load += ["sequence_length"] * (model["sequence_length"] is not None) + vocabulary
    read = ["files"] * several + ["out"] * (kind == "tokens")
    read += ["sequence_length"] * (data.get("packing", True) is not True) + vocabulary
    arguments = ", ".join(_argument(name, model["kind"]) for name in load)
    call = f"    train_data, held_out = rank_0_first(load_data, {arguments})"
    constants = [name if name == "files" else name.upper() for name in read]
    return {
        "load_parameters": [PARAMETERS[name] for name in load],
        "load_arguments": arguments,
        "load_fits": len(call) <= LINE,
        "corpus_parameters": [PARAMETERS[name] for name in read],
        "corpus_arguments": ", ".join(read),
        "prepare_arguments": ", ".join(constants),
    }


def _has_vocabulary(data: Mapping[str, Any]) -> bool:
    """Whether the ids of the data are checked against the vocabulary of the model."""
    known = data["kind"] in ("tokens", "images", "import", "synthetic")
    return known or data.get("tokenizer") is not None


def has_corpus(data: Mapping[str, Any]) -> bool:
    """Whether files become token ids in a module of their own."""
    return data["kind"] == "tokens" or is_prepared(data)


def is_prepared(data: Mapping[str, Any]) -> bool:
    """Whether a program of its own makes the tokens before training."""
    return data["kind"] in ("jsonl", "parquet", "datasets") or data.get("tokenizer") is not None


def _validation(written: Any) -> dict[str, list[str]] | list[str] | None:
    """The files for validation, each set as a list."""
    if isinstance(written, dict):
        return {
            name: [files] if isinstance(files, str) else files for name, files in written.items()
        }
    return [written] if isinstance(written, str) else written


def _sets(data: Mapping[str, Any]) -> list[str]:
    """The names of the parts that are validated apart; [] for a single one without a name."""
    validation = data.get("validation")
    if isinstance(validation, dict):
        return list(validation)
    return [source["name"] for source in data.get("mixture", [])] if validation is None else []


def _all_files(data: Mapping[str, Any]) -> list[str]:
    validation = _validation(data.get("validation")) or []
    lists = validation.values() if isinstance(validation, dict) else [validation]
    mixture = [source["files"] for source in data.get("mixture", [])]
    return [file for files in (data.get("files", []), *mixture, *lists) for file in files]


def _argument(name: str, model: str) -> str:
    if name == "out":
        return "Path(args.out)"
    return f"config.{name}" if model == "decoder" else name.upper()


def _token_type(vocabulary: int, tokenizer: bool) -> str:
    """The smallest numpy type that holds every id."""
    if not tokenizer:
        return "uint8"
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def _cache_settings(data: Mapping[str, Any]) -> str:
    """What the tokens on the disk depend on, beside the files: constants of corpus.py, parameters
    and a word.
    """
    asked = {
        "SPLIT": data["kind"] == "datasets",
        "FIELD": "field" in data,
        "SEPARATOR": "separator" in data,
        "sequence_length": data.get("packing", True) is not True,
        "vocabulary": data.get("tokenizer") is not None,
    }
    names = [name for name, needed in asked.items() if needed]
    return ", ".join(names) + "," * (len(names) == 1)
