"""The errors, all derived from `FreezingError`, and how they list names."""

from collections.abc import Sequence


class FreezingError(Exception):
    """Base of every error raised here. The model's `requires_grad` flags are as they were."""


class FreezeConfigError(FreezingError):
    """The patterns have the wrong shape, config or model can't be found, or ranks disagree on them."""


class UnmatchedPatternError(FreezingError):
    """A pattern matches no parameter on any rank, or a carve-out takes nothing away."""


class UnsupportedBackendError(FreezingError):
    """The backend can't honour the freeze, or its optimizer can't be checked."""


class FrozenParameterInOptimizerError(FreezingError):
    """An optimizer holds a parameter that should be frozen."""


class FrozenParameterChangedError(FreezingError):
    """A frozen parameter can be trained again, is another tensor, or has other values than before."""


class NothingTrainableError(FreezingError):
    """The patterns leave nothing to train."""


class ResumeMismatchError(FreezingError):
    """A checkpoint was saved under another freeze list."""

    def __init__(self, text: str, now_trainable: Sequence[str] = (), now_frozen: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.now_trainable = tuple(now_trainable)
        """Frozen when the checkpoint was saved."""
        self.now_frozen = tuple(now_frozen)
        """Trainable when the checkpoint was saved."""


def printable(text: str) -> str:
    """The text with newlines, terminal escapes and the like written out, as in a Python string."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def listing(names: Sequence[str], limit: int = 10) -> str:
    """Names for an error text: the first `limit`, then how many more there are."""
    shown = ", ".join(printable(name) for name in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
