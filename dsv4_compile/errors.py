"""The errors a user can meet: one class per mistake, each message says what, where, and what to do.

They derive from Dynamo's `ShortenTraceback`, which `torch.compile` passes on unchanged: anything else that leaves
a backend is wrapped in `BackendCompilerFailed`, or, worse, turned into a silent graph break. Importing that class
imports Dynamo, so modules that must stay cheap to import raise through a local import of this one.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch._dynamo.exc import ShortenTraceback


class Dsv4Error(ShortenTraceback):
    """Base of every error raised on purpose by this package."""

    def __init__(self, message: str) -> None:
        # None: show the whole traceback, there is no frame of ours that means anything to the user
        super().__init__(message, first_useful_frame=None)


class UnknownOpError(Dsv4Error):
    """An op name that torch does not know, or an argument name that the op does not have."""


class OptionError(Dsv4Error):
    """An option of the backend is unknown, or has the wrong type or value."""


class ArgumentError(Dsv4Error):
    """A function of this package, such as `register_op` or `capture`, was called with an argument it does not take."""


class TrainingError(Dsv4Error):
    """The compiled model was called with grad enabled on something that requires grad."""


class UnsupportedInputError(Dsv4Error):
    """An input of the model is of a kind that cannot be captured."""


class UnsupportedTransformError(Dsv4Error):
    """The graph is inside of a `torch.func` transform (vmap, grad, jvp), whose levels cannot be cut into pieces."""


class HazardError(Dsv4Error):
    """A captured node would read step state or the step context of a runner that replaces it every step."""


class FullGraphError(Dsv4Error):
    """With `decode="full"`: the whole step cannot be one captured graph, not even in uniform decode."""


class AliasingOpError(Dsv4Error):
    """An op returns, or shares storage with, something that its schema promises it does not."""


class PlanError(Dsv4Error):
    """An invariant of the plan does not hold: a fault of this package, never of the model."""


class ExplainError(Dsv4Error):
    """There is nothing to explain: no graph, no such module or function."""


class RunnerError(Dsv4Error):
    """Base of the errors of the model runners; the other requests of the runner go on unharmed."""


class InvalidRequestError(RunnerError):
    """A request is empty, too long, or holds a token id outside of the vocabulary."""


class OutOfBlocksError(RunnerError):
    """No free cache block is left for a request."""


class UnsupportedConfigError(Dsv4Error):
    """A model configuration asks for something this package does not build (for example another cache format)."""


class CacheBindingError(Dsv4Error):
    """An attention layer has no caches, or is given those of another kind of layer, of another format
    or of fewer layers."""


class CaptureError(Dsv4Error):
    """A captured graph cannot hold what a piece does, captures are nested, or a released graph was replayed.

    Attributes:
        reason: what was refused while something was recorded, as "op does this"; None if nothing was.
        line: where the user wrote that.
        node: the node of the graph that did it, if that is known.
    """

    reason: str | None = None
    line: str | None = None
    node: object = None


class PieceCompileError(Dsv4Error):
    """The piece compiler failed on a piece, or what it made returns something else than the piece does."""


class CollectiveError(Dsv4Error):
    """A collective of the compiled model has failed, most often since another rank failed, ended, or differs."""


class LayoutMismatchError(Dsv4Error):
    """A custom op's result has another shape, dtype or, in a compiled piece, strides than its fake promised."""


class ReplayMismatchError(Dsv4Error):
    """With `check="full"`: the replay of a piece differs from running it uncaptured."""


class StreamRaceError(Dsv4Error):
    """Two conflicting accesses on two streams are unordered, or one is not forked, not joined, or waits in vain."""


def did_you_mean(word: object, valid: Sequence[str]) -> str:
    """How to go on after "unknown NAME": the closest valid word as a question, or a full stop."""
    close: list[str] = []
    if isinstance(word, str) and word:
        close = difflib.get_close_matches(word, valid, n=1) or [name for name in valid if name.startswith(word)]
    return f": did you mean {close[0]!r}?" if close else "."
