"""A draft of another family through the whole cluster: plain decoding's tokens, and drafts that are right.

Both models recite one circle of words. Each is a Llama whose layers add nothing, so that the next token depends on the
last one only; their tokenizers differ in kind, in ids, in begin of sequence, and in the words they cut in two.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem.v1 import types_pb2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.integration.harness import Cluster, receive, request, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

torch.set_num_threads(1)

CIRCLE = (
    " alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo"
    " sierra tango uniform victor whiskey xray yankee zulu größe 価格"
)
WORDS = CIRCLE.split()
HIDDEN = 128
LENGTH = 120
OFF, MODEL = types_pb2.SPECULATION_MODE_OFF, types_pb2.SPECULATION_MODE_MODEL


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=448, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CIRCLE], trainer)
    return tokenizer


def sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    # A third of the words stay in pieces: not every word gets its merges.
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *pieces], limit_alphabet=40, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


def reciter(tokenizer: Tokenizer, folder: Path, **roles: Any) -> Path:
    """A model that says the circle in this tokenizer's tokens, each after the one before, mostly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=448,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        **roles,
    )
    torch.manual_seed(8)
    model = LlamaForCausalLM(config).float()
    successor = successors(tokenizer)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        embedding = torch.nn.functional.normalize(torch.randn(448, HIDDEN), dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.normal_(0.0, 0.02)
        for token_id, following in successor.items():
            model.lm_head.weight[following] += 0.6 * embedding[token_id]
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def successors(tokenizer: Tokenizer) -> dict[int, int]:
    """What follows each token of the circle; the first time counts where one occurs twice."""
    ids = tokenizer.encode(CIRCLE * 3, add_special_tokens=False).ids
    ids = ids[len(ids) // 3 - 5 :]
    following: dict[int, int] = {}
    for token_id, after in itertools.pairwise(ids):
        following.setdefault(token_id, after)
    return following


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    gpt, llama = byte_level(), sentence_piece()
    # The target says a word in one token; a third of the words take the draft two.
    assert len(gpt.encode(CIRCLE).ids) == len(WORDS) < 1.3 * len(WORDS) < len(llama.encode(CIRCLE).ids)
    return {
        "gpt": reciter(gpt, tmp_path_factory.mktemp("gpt"), eos_token_id=0),
        "llama": reciter(llama, tmp_path_factory.mktemp("llama"), bos_token_id=1, eos_token_id=2),
    }


@pytest.fixture(scope="module")
async def cluster(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {"model": folders["gpt"], "dtype": "float32", "num_blocks": 128}
    options["scheduler"] = {"speculation": "fixed"}
    async with running(tmp_path_factory.mktemp("cluster"), max_model_len=512, **options) as started:
        yield started


async def answers(cluster: Cluster, mode: int, temperature: float) -> list[Any]:
    params = {"temperature": temperature}
    messages = [request(f"Say {word}", LENGTH, seed=seed, **params) for seed, word in enumerate(WORDS[::7])]
    for message in messages:
        message.speculation.mode = mode
    return await asyncio.gather(*(receive(cluster.stub().GenerateStream(message)) for message in messages))


@pytest.mark.parametrize("vocabulary", ["text", "intersection"])
async def test_plain_tokens_from_right_and_wrong_drafts(
    cluster: Cluster, folders: dict[str, Path], vocabulary: str
) -> None:
    flags = {"vocabulary": vocabulary, "proposer": "model", "dtype": "float32", "threads": 1, "kv_cache_gib": 0.01}
    await cluster.add_draft_worker("draft", str(folders["llama"]), **flags)
    try:
        await cluster.until_serving(1, drafting=True)
        for temperature in (0.0, 0.7):
            plain = await answers(cluster, OFF, temperature)
            assert len({tuple(one.tokens[0]) for one in plain}) > 2
            drafted = accepted = 0
            # How much is drafted in time is a matter of speed, so again until enough was.
            async with asyncio.timeout(120):
                while not 0 < accepted < drafted:
                    speculative = await answers(cluster, MODEL, temperature)
                    assert [one.tokens for one in speculative] == [one.tokens for one in plain]
                    drafted += sum(one.usage.drafted_tokens for one in speculative)
                    accepted += sum(one.usage.accepted_tokens for one in speculative)
        status = await cluster.status()
        assert vocabulary in status.draft_workers[0].proposer
        await cluster.assert_baseline()
    finally:
        await cluster.processes.pop("draft").stop()
        await cluster.until_serving(1, drafting=False)
