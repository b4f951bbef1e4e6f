"""What `--additional-config` asks for: options of the backend and of this integration, checked before a model loads.

The same JSON may hold what other plugins read, so only our key is looked at. One that is nearly our key is a mistake of
typing, which would switch everything off without a word.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from ...config import Config
from ...errors import OptionError, did_you_mean

KEY = "dsv4_compile"


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """What the user asks for.

    Attributes:
        pad: batches are padded to the next capture size where vLLM would not do so. Some attention of vLLM for CPUs
            cannot take padded inputs.
        backend: options of `dsv4_piecewise` by name.
    """

    pad: bool = True
    backend: Mapping[str, object] = field(default_factory=dict)

    def for_backend(self, *, runner: Literal["mrv1", "mrv2"], capture_sizes: Sequence[int] | None) -> dict[str, object]:
        """The options of the backend, with what vLLM's configuration tells where the user says nothing."""
        told: dict[str, object] = {"runner": runner}
        if capture_sizes:
            told["capture_sizes"] = list(capture_sizes)
        return {**told, **self.backend}


def read_options(additional_config: object) -> VllmOptions | None:
    """The options in vLLM's `additional_config`; None if it does not ask for this backend.

    Raises:
        OptionError: an unknown option or a value that it does not take, or a key that is nearly ours.
    """
    if not isinstance(additional_config, Mapping):
        return None
    if KEY not in additional_config:
        _refuse_near_miss(additional_config)
        return None
    given = additional_config[KEY]
    if not isinstance(given, Mapping):
        raise OptionError(f"additional_config has {KEY}={given!r}; it must be a dict from option names to values")
    own = [option.name for option in fields(VllmOptions) if option.name != "backend"]
    valid = [*own, *(option.name for option in fields(Config))]
    for name in given:
        if name not in valid:
            raise OptionError(
                f"additional_config: unknown option {name!r} of {KEY}{did_you_mean(name, valid)} "
                f"Valid: {', '.join(valid)}"
            )
    pad = given.get("pad", True)
    if not isinstance(pad, bool):
        raise OptionError(f"option pad={pad!r} must be True or False")
    backend = {name: value for name, value in given.items() if name not in own}
    # the ops that it names are defined once the model is imported: they are looked up when it is compiled
    Config.from_options({name: value for name, value in backend.items() if name != "split_ops"})
    return VllmOptions(pad=pad, backend=backend)


def _refuse_near_miss(additional_config: Mapping[object, object]) -> None:
    texts = [name for name in additional_config if isinstance(name, str)]
    near = difflib.get_close_matches(KEY, texts, n=1, cutoff=0.8)
    if near:
        raise OptionError(f"additional_config has {near[0]!r}: did you mean {KEY!r}?")
