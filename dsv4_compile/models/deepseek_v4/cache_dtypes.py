"""What the fields `kv_cache_dtype` and `index_cache_dtype` may say: a dtype for plain rows, or a packed format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import UnsupportedConfigError, did_you_mean
from ...ops.cache_formats import FP8, FP8_DS_MLA, MXFP4, PLAIN

_PLAIN_WORDS: dict[str, torch.dtype | None] = {"auto": None, "float32": torch.float32, "bf16": torch.bfloat16}
KV_WORDS: dict[str, torch.dtype | None] = {**_PLAIN_WORDS, FP8_DS_MLA: torch.uint8}
INDEX_WORDS: dict[str, torch.dtype | None] = {**_PLAIN_WORDS, FP8: torch.uint8, MXFP4: torch.uint8}
_STORED: dict[object, torch.dtype | None] = dict((*KV_WORDS.items(), *INDEX_WORDS.items()))
_SYNONYMS: dict[object, str] = {"bfloat16": "bf16", torch.bfloat16: "bf16", torch.float32: "float32"}


def read_cache_dtype(name: str, value: object, words: Mapping[str, object]) -> str:
    """The word for a value of the field `name`.

    Raises:
        UnsupportedConfigError: there is no such format.
    """
    word = _SYNONYMS.get(value, value) if isinstance(value, (str, torch.dtype)) else None
    if isinstance(word, str) and word in words:
        return word
    raise UnsupportedConfigError(
        f"{name} {value!r} is not supported{did_you_mean(value, tuple(words))} Supported are {', '.join(words)}"
    )


def packed_format(word: object) -> str:
    """The name of a packed format, or "auto" where the rows are plain."""
    return PLAIN if word in _PLAIN_WORDS else str(word)


def stored_dtype(word: object) -> torch.dtype | None:
    """The dtype of a cache, None for that of the model."""
    return _STORED[word]
