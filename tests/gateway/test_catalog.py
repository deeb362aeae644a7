"""What a served model is known to be, with and without workers."""

from __future__ import annotations

import pytest

from cluster.errors import InvalidField, NotFound
from gateway.catalog import Catalog
from gateway.convert import ModelNews
from gateway.text import ModelText

NEWS = ModelNews("a", 2, max_model_len=100, vocab_size=260, max_sequence_tokens=80, fingerprints=("f",))


@pytest.fixture
def catalog(byte_text: ModelText, chat_text: ModelText) -> Catalog:
    return Catalog({"a": byte_text, "b": chat_text})


def test_an_empty_name_means_the_only_model(catalog: Catalog, byte_text: ModelText) -> None:
    assert Catalog({"a": byte_text}).find("") is byte_text
    assert catalog.find("a") is byte_text
    with pytest.raises(InvalidField) as error:
        catalog.find("")
    assert error.value.field == "model"
    with pytest.raises(NotFound):
        catalog.find("c")


def test_the_folder_speaks_until_a_worker_does(catalog: Catalog, byte_text: ModelText) -> None:
    facts = catalog.facts("a")
    assert (facts.max_model_len, facts.vocab_size, facts.max_sequence_tokens) == (512, 264, None)
    catalog.update([NEWS])
    facts = catalog.facts("a")
    assert (facts.max_model_len, facts.vocab_size, facts.max_sequence_tokens) == (100, 260, 80)
    assert (catalog.num_workers("a"), catalog.fingerprints("a")) == (2, ("f",))
    assert catalog.facts("b").max_sequence_tokens is None


def test_a_model_without_workers_keeps_its_lengths_but_no_pool(catalog: Catalog) -> None:
    catalog.update([NEWS])
    for forget in (catalog.forget_workers, lambda: catalog.update([ModelNews("b", 1, 9, 9, 9, ())])):
        forget()
        facts = catalog.facts("a")
        assert (facts.max_model_len, facts.max_sequence_tokens) == (100, None)
        assert (catalog.num_workers("a"), catalog.fingerprints("a")) == (0, ())
    catalog.update([NEWS])
    assert catalog.facts("a").max_sequence_tokens == 80
