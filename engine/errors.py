"""What can be wrong with a model, each with a message for the person who started the process."""

from __future__ import annotations


class ModelError(Exception):
    """The model can't be served; the message says why and what would help."""


class ModelNotFound(ModelError):
    """There is no such folder, file or repository, or it can't be reached."""


class IncompleteModel(ModelError):
    """A file that the model needs is missing or cut short; the message names it."""


class UnsupportedModel(ModelError):
    """This kind of model can't run here; the message names the feature."""


class VocabularyMismatch(ModelError):
    """Two models don't share a vocabulary; the message names the first token that differs."""


class OutOfMemory(ModelError):
    """The model or its KV cache doesn't fit; the message has the numbers."""
