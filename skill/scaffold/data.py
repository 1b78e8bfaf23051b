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
PARAMETERS = {"files": "files: Sequence[str]", "out": "out: Path"}
PARAMETERS |= {"sequence_length": "sequence_length: int", "vocabulary": "vocabulary: int"}
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
    data, length = values["data"], values["model"]["sequence_length"]
    kind, tokenizer = data["kind"], data.get("tokenizer") is not None
    packing = data.get("packing", True)
    packed, prepared = packing is True, is_prepared(data)
    vocabulary = tokenizer or kind in ("tokens", "images", "import", "synthetic")
    wanted = {
        "out": kind in ("tokens", "images"),
        "sequence_length": length is not None,
        "vocabulary": vocabulary,
    }
    byte_text = kind == "text" and not tokenizer
    words, title = ("byte-level text", "Byte-level text") if byte_text else TITLES[kind]
    arguments = ", ".join(
        _argument(name, values["model"]["kind"]) for name in wanted if wanted[name]
    )
    mixture, validation = data.get("mixture", []), _validation(data.get("validation"))
    several = bool(mixture) or validation is not None
    read = {
        "files": several,
        "out": kind == "tokens",
        "sequence_length": not packed,
        "vocabulary": vocabulary,
    }
    parquet = kind == "parquet" or data.get("format") == "parquet"
    used = {"tokenizer": tokenizer and kind != "chat", "parquet": parquet, kind: True}
    return {
        "kind": kind,
        "tokenizer": tokenizer,
        "packed": packed,
        "masked": packing == "documents",
        "mask_parameter": ", mask: Mask" if packing == "documents" else "",
        "chat": kind == "chat",
        "cache": data.get("cache", "tokens"),
        "parquet": parquet,
        "byte_text": byte_text,
        "as_bytes": not tokenizer and kind in ("text", "jsonl", "datasets"),
        "corpus": has_corpus(data),
        "prepared": prepared,
        "windows": packed and kind in ("text", "tokens", "jsonl", "parquet", "datasets"),
        "documents": not packed,
        "mixture": {source["name"]: source["files"] for source in mixture},
        "weights": {source["name"]: source["weight"] for source in mixture},
        "validation": validation,
        "several": several,
        "sets": _sets(data),
        "stdlib": any(file.startswith("{stdlib}") for file in _all_files(data)),
        "synthetic": kind == "synthetic",
        "images": kind == "images",
        "dry_sample": length is None and kind == "import",
        "vocabulary_checked": vocabulary,
        "load_parameters": [PARAMETERS[name] for name in wanted if wanted[name]],
        "corpus_parameters": [PARAMETERS[name] for name in read if read[name]],
        "corpus_arguments": ", ".join(name for name in read if read[name]),
        "prepare_arguments": ", ".join(
            name if name == "files" else name.upper() for name in read if read[name]
        ),
        "corpus_type": "np.ndarray" if packed else "Corpus",
        "load_arguments": arguments,
        "load_fits": (
            len(f"    train_data, held_out = rank_0_first(load_data, {arguments})") <= LINE
        ),
        "token_type": _token_type(values["model"]["vocabulary"], tokenizer),
        "raw_dtype": RAW.get(data.get("dtype", "")),
        "cache_settings": _cache_settings(data) if prepared else "",
        "data_title": title,
        "data_words": words,
        "data_packages": [package for package, key in PACKAGES.items() if used.get(key)],
    }


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
    return (
        "Path(args.out)"
        if name == "out"
        else f"config.{name}"
        if model == "decoder"
        else name.upper()
    )


def _token_type(vocabulary: int, tokenizer: bool) -> str:
    """The smallest numpy type that holds every id."""
    return "uint8" if not tokenizer else "uint16" if vocabulary <= 1 << 16 else "uint32"


def _cache_settings(data: Mapping[str, Any]) -> str:
    """What the tokens on the disk depend on, beside the files: constants of corpus.py, parameters
    and a word.
    """
    kind, tokenizer = data["kind"], data.get("tokenizer") is not None
    names = (
        ["SPLIT"] * (kind == "datasets")
        + ["FIELD"] * ("field" in data)
        + ["SEPARATOR"] * ("separator" in data)
    )
    if data.get("packing", True) is not True:
        names.append("sequence_length")
    names += ["vocabulary"] * tokenizer
    return ", ".join(names) + "," * (len(names) == 1)
