"""Bad input is refused by field, at once, and a neighbour in the same batch gives exactly what it gives alone."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tandem.v1 import generation_pb2

from tests.integration.harness import Cluster, expected_tokens, receive, request, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NEIGHBOUR = list(b"an innocent neighbour")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: Any) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {"num_blocks": 32, "max_model_len": 600, "fake_step_ms": 1}
    async with running(tmp_path_factory.mktemp("cluster"), draft="fake", **options) as started:
        yield started


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The rich details by type name."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no rich status: {error}"
    found: dict[str, Any] = {}
    for detail in status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.ResourceInfo):
            if detail.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = kind.FromString(detail.value)
    return found


def changed(**paths: Any) -> Callable[[], Any]:
    """A good request with some fields changed; `sampling__top_p=2` is sampling.top_p = 2."""

    def make() -> Any:
        message = request("fine")
        for path, value in paths.items():
            target = message
            *parents, name = path.split("__")
            for parent in parents:
                target = getattr(target, parent)
            if isinstance(value, list):
                del getattr(target, name)[:]
                getattr(target, name).extend(value)
            elif isinstance(value, dict):
                getattr(target, name).update(value)
            else:
                setattr(target, name, value)
        return message

    return make


def chat(*messages: tuple[str, str]) -> Callable[[], Any]:
    def make() -> Any:
        message = request("")
        message.chat.SetInParent()
        for role, content in messages:
            message.chat.messages.add(role=role, content=content)
        return message

    return make


def token_ids(ids: list[int], max_tokens: int = 4) -> Callable[[], Any]:
    def make() -> Any:
        message = request(ids, max_tokens)
        message.token_ids.SetInParent()
        return message

    return make


def without_prompt() -> Any:
    message = request("x")
    message.ClearField("text")
    return message


BAD: list[tuple[str, Callable[[], Any], str]] = [
    ("no prompt", without_prompt, "prompt"),
    ("empty text", changed(text=""), "text"),
    ("empty ids", token_ids([]), "token_ids"),
    ("id outside", token_ids([5, 260]), "token_ids"),
    ("huge id", token_ids([2**32 - 1]), "token_ids"),
    ("prompt over context", token_ids([65] * 601), "token_ids"),
    ("prompt over pool", token_ids([65] * 530), "token_ids"),
    ("max_tokens over context", changed(stop__max_tokens=10_000), "stop.max_tokens"),
    ("max_tokens 0", changed(stop__max_tokens=0), "stop.max_tokens"),
    ("min over max", changed(stop__min_tokens=50, stop__max_tokens=10), "stop.min_tokens"),
    ("negative temperature", changed(sampling__temperature=-0.1), "sampling.temperature"),
    ("nan temperature", changed(sampling__temperature=math.nan), "sampling.temperature"),
    ("infinite temperature", changed(sampling__temperature=math.inf), "sampling.temperature"),
    ("top_k -2", changed(sampling__top_k=-2), "sampling.top_k"),
    ("top_p 0", changed(sampling__top_p=0.0), "sampling.top_p"),
    ("top_p over 1", changed(sampling__top_p=1.5), "sampling.top_p"),
    ("top_p nan", changed(sampling__top_p=math.nan), "sampling.top_p"),
    ("min_p negative", changed(sampling__min_p=-0.5), "sampling.min_p"),
    ("repetition 0", changed(sampling__repetition_penalty=0.0), "sampling.repetition_penalty"),
    ("presence over 2", changed(sampling__presence_penalty=2.5), "sampling.presence_penalty"),
    ("frequency nan", changed(sampling__frequency_penalty=math.nan), "sampling.frequency_penalty"),
    ("bias outside", changed(sampling__logit_bias={265: 1.0}), "sampling.logit_bias"),
    ("bias nan", changed(sampling__logit_bias={5: math.nan}), "sampling.logit_bias"),
    ("empty bad word", changed(sampling__bad_words=[""]), "sampling.bad_words"),
    ("empty stop", changed(stop__strings=[""]), "stop.strings"),
    ("stop id outside", changed(stop__token_ids=[260]), "stop.token_ids"),
    ("too many logprobs", changed(output__top_logprobs=21), "output.top_logprobs"),
    ("too many prompt logprobs", changed(output__prompt_logprobs=21), "output.prompt_logprobs"),
    ("n 0", changed(n=0), "n"),
    ("n huge", changed(n=100_000), "n"),
    ("no messages", chat(), "chat"),
    ("empty role", chat(("", "hi")), "chat"),
]


async def refusal_of(cluster: Cluster, message: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(cluster.stub().GenerateStream(message, timeout=10))
    return caught.value


@pytest.mark.parametrize(("name", "make", "field"), BAD, ids=[name for name, _, _ in BAD])
async def test_bad_input_names_its_field(cluster: Cluster, name: str, make: Callable[[], Any], field: str) -> None:
    error = await refusal_of(cluster, make())
    assert error.code() is INVALID, error
    found = details(error)
    assert field in found["BadRequest"].field_violations[0].field
    assert found["ErrorInfo"].domain == "tandem"
    unary = generation_pb2.GenerateRequest.FromString(make().SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub().Generate(unary, timeout=10)
    assert caught.value.code() is INVALID


async def test_an_unknown_model_is_not_found(cluster: Cluster) -> None:
    error = await refusal_of(cluster, changed(model="nobody")())
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert details(error)["ResourceInfo"].resource_name == "nobody"


async def test_a_live_id_cannot_be_used_again(cluster: Cluster) -> None:
    stub = cluster.stub()
    first = stub.GenerateStream(changed(request_id="same", stop__max_tokens=100)())
    answer = asyncio.ensure_future(receive(first))
    await cluster.until_status(lambda status: status.running == 1)
    error = await refusal_of(cluster, changed(request_id="same")())
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert (await answer).tokens[0] == expected_tokens(list(b"fine"), 100)
    await receive(stub.GenerateStream(changed(request_id="same")()))


async def test_a_neighbour_of_all_bad_input_is_not_disturbed(cluster: Cluster) -> None:
    """Every bad request at once, beside one good stream that runs all the while."""
    before = (await cluster.status()).counters
    neighbour = asyncio.ensure_future(receive(cluster.stub().GenerateStream(request(NEIGHBOUR, 250, temperature=0.9))))
    errors = await asyncio.gather(*(refusal_of(cluster, make()) for _, make, _ in BAD))
    assert {error.code() for error in errors} == {INVALID}
    assert (await neighbour).tokens[0] == expected_tokens(NEIGHBOUR, 250, temperature=0.9)
    await cluster.assert_baseline()
    after = (await cluster.status()).counters
    assert after.requests_accepted - before.requests_accepted == 1
    assert after.requests_finished - before.requests_finished == 1


async def test_a_prompt_over_the_context_then_one_that_fits(cluster: Cluster) -> None:
    await refusal_of(cluster, token_ids([65] * 601)())
    assert (await receive(cluster.stub().GenerateStream(request("hi", 5)))).tokens[0] == expected_tokens(list(b"hi"), 5)


def fuzzed(rng: random.Random) -> Any:
    """A request of random fields with random values, most of them hostile."""
    message = request(
        rng.choice(["ok", "", "\x00", "é" * 50, "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")])
    )
    floats = [0.0, -1.0, 1.0, 2.0, math.nan, math.inf, -math.inf, 1e-38, 3e38, 0.5]
    integers = [0, 1, 2, 7, 255, 256, 259, 260, 2**31 - 1, 2**32 - 1]
    for holder in (message.sampling, message.stop, message.output, message):
        for descriptor in holder.DESCRIPTOR.fields:
            if rng.random() < 0.8 or (descriptor.message_type and not descriptor.message_type.GetOptions().map_entry):
                continue
            try:
                if descriptor.message_type:
                    getattr(holder, descriptor.name)[rng.choice(integers)] = rng.choice(floats)
                elif descriptor.cpp_type == descriptor.CPPTYPE_FLOAT:
                    setattr(holder, descriptor.name, rng.choice(floats))
                elif descriptor.cpp_type == descriptor.CPPTYPE_BOOL:
                    setattr(holder, descriptor.name, rng.random() < 0.5)
                elif descriptor.is_repeated:
                    values = ["", "a", "xyz"] if descriptor.cpp_type == descriptor.CPPTYPE_STRING else integers
                    getattr(holder, descriptor.name).extend(rng.choices(values, k=rng.randint(1, 3)))
                elif descriptor.cpp_type == descriptor.CPPTYPE_STRING and descriptor.name != "text":
                    setattr(holder, descriptor.name, rng.choice(["", "fake", "other", "ü" * 300]))
                elif descriptor.cpp_type != descriptor.CPPTYPE_STRING:
                    setattr(holder, descriptor.name, rng.choice([*integers, -1, -(2**31)]))
            except ValueError:
                continue  # protobuf itself refuses it: out of the type's range
    if not message.stop.HasField("max_tokens") or message.stop.max_tokens > 64:
        message.stop.max_tokens = rng.randint(1, 64)
    return message


async def test_fuzzed_requests_end_in_answers_or_clear_errors(cluster: Cluster) -> None:
    rng = random.Random(20)
    neighbour = asyncio.ensure_future(receive(cluster.stub().GenerateStream(request(NEIGHBOUR, 400))))
    stub = cluster.stub()
    allowed = {INVALID, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS}
    outcomes = {"answered": 0, "refused": 0}
    for _ in range(30):
        calls = [receive(stub.GenerateStream(fuzzed(rng), timeout=20)) for _ in range(10)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, grpc.aio.AioRpcError):
                assert outcome.code() in allowed, outcome
                outcomes["refused"] += 1
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                outcomes["answered"] += 1
    assert min(outcomes.values()) > 20, outcomes
    assert (await neighbour).tokens[0] == expected_tokens(NEIGHBOUR, 400)
    await cluster.assert_baseline()
    assert all(process.child.returncode is None for process in cluster.processes.values())
