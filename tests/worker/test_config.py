"""What a worker's configuration refuses."""

from __future__ import annotations

from typing import Any

import pytest

from worker.config import WorkerConfig


@pytest.mark.parametrize("fields", [{"model": "/m", "served_model_name": "a=b"}, {"model": "/models/a=b/"}])
def test_a_name_that_gateways_cannot_be_given_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a served name has no '=', unlike 'a=b'"):
        WorkerConfig(**fields).validate()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"draft_model": ""}, "--draft-model is empty"),
        ({"draft_model": "ngram", "proposer": "combined"}, "--proposer combined needs a model: --draft-model FOLDER"),
        (
            {"draft_model": "/small", "engine": "fake"},
            "the fake engine is drafted for by fake or ngram, not by .*/small",
        ),
    ],
)
def test_own_drafts_that_cannot_be_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        WorkerConfig(model="/m", draft="own", **fields).validate()
    WorkerConfig(model="/m", draft="on", **fields).validate()


def test_any_other_name_passes() -> None:
    WorkerConfig(model="/models/a=b", served_model_name="a:b/c d").validate()
