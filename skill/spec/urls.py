"""Data files behind URLs: what opens them, and where a spec cannot have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from .crosschecks import Values, fault, file_lists, needs, needs_each
from .data_files import is_url

SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://.")
PASSWORD = re.compile(r"[^/]*://[^/@]*:[^/@]*@")
PACKAGES = {  # scheme: the package beside fsspec that opens it; others are left to the user
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hdfs": "pyarrow",
    "hf": "huggingface_hub",
    "oss": "ossfs",
}
INSTEAD = {
    "text": "write data.tokenizer beside it, or data.kind jsonl or parquet",
    "tokens": (
        "copy the files to a disk that the ranks share, or give texts (data.kind jsonl or parquet)"
    ),
}


def packages(urls: list[str]) -> list[str]:
    """What must be installed to open them."""
    others = {
        PACKAGES[scheme]
        for scheme in (url.partition("://")[0] for url in urls)
        if scheme in PACKAGES
    }
    return ["fsspec", *sorted(others)] if urls else []


@needs("data.files", "data.mixture", "data.validation", "data.kind")
def urls_can_be_opened(
    values: Values, _files: Any, _mixture: Any, _validation: Any, kind: str
) -> Iterator[Fault]:
    prepared = kind not in INSTEAD or (
        "data.tokenizer" in values and values["data.tokenizer"] is not None
    )
    for key, below, files in file_lists(values):
        for number, file in enumerate([files] if isinstance(files, str) else files):
            if not is_url(file):
                continue
            place = (*below, *([] if isinstance(files, str) else [number]))
            if not prepared:
                yield fault(key, f"cannot be a URL for data.kind {kind}: {INSTEAD[kind]}", *place)
            elif "::" in file:
                yield fault(key, "must be one URL, not a chain of them with '::'", *place)
            elif not SCHEME.match(file):
                yield fault(key, f"must start with a scheme such as s3://, found {file!r}", *place)
            elif PASSWORD.match(file):
                message = (
                    "must hold no password, since spec.yaml is kept with the code: fsspec reads"
                    " secrets from "
                )
                yield fault(
                    key, f"{message}the environment and from files of the home folder", *place
                )


@needs_each("data.folder", "data.tokenizer", "model.config", "model.pretrained", "train.init_from")
def paths_are_no_urls(values: Values, key: str, path: Any) -> Iterator[Fault]:
    if isinstance(path, str) and is_url(path):
        where = "copy what is there to a disk that all ranks share, and write its path"
        yield fault(
            key, f"cannot be a URL (data.files, data.mixture and data.validation can): {where}"
        )
