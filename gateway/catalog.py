"""The served models: what the gateway read from their folders, and what the scheduler says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.errors import InvalidField, NotFound
from gateway.admission import ModelFacts
from gateway.convert import ModelNews
from gateway.text import ModelText

# Where neither the folder nor a worker says how long a text may be.
_UNKNOWN_LENGTH = 2**31


class Catalog:
    """Models in the order of configuration. Owned by the event loop."""

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self._texts = dict(texts)
        self._news: dict[str, ModelNews] = {}

    @property
    def names(self) -> list[str]:
        """Every served name."""
        return list(self._texts)

    def update(self, models: Sequence[ModelNews]) -> None:
        """The scheduler's list, whole. What a worker once said of a model holds on while it has none."""
        news = {model.name: model for model in models}
        for name, old in self._news.items():
            if name not in news:
                news[name] = ModelNews(name, 0, old.max_model_len, old.vocab_size, old.max_sequence_tokens, ())
        self._news = news

    def forget_workers(self) -> None:
        """The scheduler is away: nobody serves as far as this gateway can tell."""
        self.update([])

    def num_workers(self, name: str) -> int:
        """Workers attached and serving."""
        news = self._news.get(name)
        return 0 if news is None else news.workers

    def fingerprints(self, name: str) -> tuple[str, ...]:
        """Numerics fingerprints of its workers, each once."""
        news = self._news.get(name)
        return () if news is None else news.fingerprints

    def find(self, name: str) -> ModelText:
        """The model a request names; the only one for an empty name. Raises NotFound or InvalidField."""
        if not name:
            if len(self._texts) == 1:
                return next(iter(self._texts.values()))
            raise InvalidField("model", f"must be one of {', '.join(self._texts)}")
        text = self._texts.get(name)
        if text is None:
            raise NotFound("model", name, f"model {name!r} is not served here")
        return text

    def facts(self, name: str) -> ModelFacts:
        """What admission needs to know of a served model: the workers' word where there is one, else the folder's."""
        text, news = self._texts[name], self._news.get(name)
        max_model_len = (news.max_model_len if news else 0) or text.max_position_embeddings or _UNKNOWN_LENGTH
        return ModelFacts(
            name=name,
            vocab_size=(news.vocab_size if news else 0) or text.vocab_size,
            max_model_len=max_model_len,
            # The next worker's pool may be larger than that of one that is gone.
            max_sequence_tokens=(news.max_sequence_tokens if news and news.workers else 0) or None,
            eos_token_ids=text.eos_token_ids,
            longest_token_bytes=text.longest_token_bytes,
        )
