"""Tiny tokenizers in folders laid out as transformers does, and a scheduler that says what a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tandem.v1 import generation_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from cluster.server import create_server
from gateway.__main__ import Gateway
from gateway.config import GatewayConfig
from gateway.session import Session
from gateway.text import ModelText

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the end",
    "Rome was not built in a day; Rome is a city, Roman and romantic",
    "stop words and stopping at the end of a line\nand another line",
    "numbers 0 1 2 3 4 5 6 7 8 9 10 100 1000, and signs !? () [] {}",
    "naïve café, 東京 and 🦊 are not ASCII",
]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folder(folder: Path, tokenizer: Tokenizer, vocab_size: int | None = None, **tokenizer_config: Any) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = vocab_size or tokenizer.get_vocab_size()
    eos = tokenizer.token_to_id("<|im_end|>")
    config = {"model_type": "test", "vocab_size": rows, "max_position_embeddings": 512, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    eos_token = {"eos_token": "<|im_end|>"} if eos is not None else {}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **eos_token, **tokenizer_config})
    )
    return folder


def byte_level(num_merges: int = 200, bos: bool = False) -> Tokenizer:
    """GPT-2's kind: byte-level BPE; with `bos`, every text gets one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def llama_style() -> Tokenizer:
    """Llama 2's kind: SentencePiece BPE with a prefix space and byte fallback."""
    words = sorted({"▁" + word for line in CORPUS for word in line.split()})
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "<|im_end|>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges: list[tuple[str, str]] = []
    for symbol in sorted({character for word in words for character in word if character.isascii()} | {"▁"}):
        vocab.setdefault(symbol, len(vocab))
    for word in words:
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if left in vocab and right in vocab and left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """A Unigram model with the Metaspace decoder."""
    pieces = sorted({piece for line in CORPUS for word in line.split() for piece in ("▁" + word, word, *word)})
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -float(len(piece))) for piece in pieces)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's kind, whose tokens don't stand for fixed bytes."""
    words = sorted({word for line in CORPUS for word in line.split()})
    vocab = ["[UNK]", *words, *(f"##{word}" for word in words if word.isalpha()), ".", ","]
    unique = list(dict.fromkeys(vocab))
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(unique)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_style": llama_style,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelText]:
    """One loaded model text per kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    loaded = {}
    for name, build in KINDS.items():
        more: dict[str, Any] = {"bos_token": "<s>"} if name == "llama_style" else {}
        loaded[name] = ModelText(name, write_folder(root / name, build(), **more))
    return loaded


@pytest.fixture(scope="session")
def chat_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """A byte-level model with a chat template, which adds a BOS to every text and writes one in its template."""
    folder = write_folder(
        tmp_path_factory.mktemp("chat"), byte_level(bos=True), bos_token="<s>", chat_template=CHAT_TEMPLATE
    )
    return ModelText("chat", folder)


@pytest.fixture(scope="session")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """A model whose ids below 256 are bytes: then <s>, <|im_start|>, <|im_end|> (its EOS), <think>; adds no BOS."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    folder = write_folder(
        tmp_path_factory.mktemp("bytes"), tokenizer, vocab_size=264, bos_token="<s>", chat_template=CHAT_TEMPLATE
    )
    return ModelText("tiny", folder)


def _symbols() -> list[str]:
    """The symbol of each byte, as GPT-2's bytes_to_unicode lays them out; checked against the library's alphabet."""
    kept = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    moved = iter(range(256, 512))
    symbols = [chr(byte if byte in kept else next(moved)) for byte in range(256)]
    assert sorted(symbols) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return symbols


# ------------------------------------------------------------------------------------------- a scripted scheduler

MODEL = scheduler_pb2.ModelState(
    name="tiny", workers=1, max_model_len=512, vocab_size=264, max_sequence_tokens=256, fingerprints=["f"]
)


class Connection:
    """One session as the scheduler sees it."""

    def __init__(self, hello: scheduler_pb2.SessionHello) -> None:
        self.hello = hello
        self.draining = asyncio.Event()
        """the gateway says that it takes no new requests"""
        self.submits: asyncio.Queue[scheduler_pb2.Submit] = asyncio.Queue()
        self.cancels: asyncio.Queue[scheduler_pb2.Cancel] = asyncio.Queue()
        self.outbox: asyncio.Queue[scheduler_pb2.SessionResponse | None] = asyncio.Queue()

    async def submit(self) -> scheduler_pb2.Submit:
        """The next request."""
        async with asyncio.timeout(10):
            return await self.submits.get()

    async def cancel(self) -> scheduler_pb2.Cancel:
        """The next cancellation."""
        async with asyncio.timeout(10):
            return await self.cancels.get()

    def say(self, *outputs: scheduler_pb2.Output) -> None:
        """Send outputs in one message."""
        self.outbox.put_nowait(scheduler_pb2.SessionResponse(outputs=outputs))

    def emit(self, submit: scheduler_pb2.Submit, token_ids: bytes | list[int], first: int = 0, **more: Any) -> None:
        """Send tokens of choice 0, or of another one; one that is all there is to say in the form that it has then."""
        if len(token_ids) == 1 and first and not more:
            plain = scheduler_pb2.PlainOutputs(
                handles=[submit.handle], token_indices=[first], token_ids=list(token_ids)
            )
            self.outbox.put_nowait(scheduler_pb2.SessionResponse(plain_outputs=plain))
            return
        self.say(scheduler_pb2.Output(handle=submit.handle, first_token_index=first, token_ids=list(token_ids), **more))

    def drop(self) -> None:
        """End the session, as a scheduler that dies would."""
        self.outbox.put_nowait(None)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Welcomes gateways and lets a test play the rest."""

    def __init__(self) -> None:
        self.term = 7
        self.models = [MODEL]
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.accepting = True

    async def connection(self) -> Connection:
        """The next session."""
        async with asyncio.timeout(10):
            return await self.connections.get()

    async def Session(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        first = await context.read()
        if not self.accepting:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        connection = Connection(first.hello)
        models = scheduler_pb2.ModelList(models=self.models)
        await context.write(
            scheduler_pb2.SessionResponse(welcome=scheduler_pb2.SessionWelcome(term=self.term), models=models)
        )
        self.connections.put_nowait(connection)
        reader = asyncio.create_task(self._read(connection, context))
        try:
            while (message := await connection.outbox.get()) is not None:
                await context.write(message)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler died")
        finally:
            reader.cancel()

    async def _read(self, connection: Connection, context: grpc.aio.ServicerContext) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.draining:
                connection.draining.set()
            for submit in request.submits:
                connection.submits.put_nowait(submit)
            for cancel in request.cancels:
                connection.cancels.put_nowait(cancel)


class Cell:
    """A gateway with its scripted scheduler and a client."""

    def __init__(self, gateway: Gateway, scheduler: ScriptedScheduler, channel: grpc.aio.Channel, address: str) -> None:
        self.gateway = gateway
        self.scheduler = scheduler
        self.channel = channel
        self.address = address
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture
async def cell_with(byte_text: ModelText) -> AsyncIterator[Callable[..., Any]]:
    """Starts a cell; keyword arguments go to GatewayConfig, `scheduler=False` leaves the scheduler out.

    `before`: another scheduler's address, which is tried first.
    """
    stack: list[Any] = []

    async def start(scheduler: bool = True, before: str = "", **settings: Any) -> Cell:
        scripted = ScriptedScheduler()
        server = create_server()
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scripted, server)
        port = server.add_insecure_port("127.0.0.1:0")
        if scheduler:
            await server.start()
        config = GatewayConfig(port=0, scheduler=f"{before},127.0.0.1:{port}", model=("tiny=unused",), **settings)
        gateway = Gateway(config, {"tiny": byte_text})
        assert isinstance(gateway.session, Session)
        gateway.session._first_backoff_s = 0.01
        address = f"127.0.0.1:{await gateway.start()}"
        channel = grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        stack.append((channel, gateway, server))
        if scheduler:
            assert await gateway.session.wait_up(10)
        return Cell(gateway, scripted, channel, address)

    yield start
    for channel, gateway, server in stack:
        await channel.close()
        await gateway.server.stop(0)
        await gateway.close()
        await server.stop(0)


@pytest.fixture
async def cell(cell_with: Callable[..., Any]) -> Cell:
    """A cell with everything at its default."""
    return await cell_with()
