"""What waits for a gateway that does not read: one entry per choice, complete and in order."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc import status_pb2
from tandem.v1 import scheduler_pb2, types_pb2

from scheduler.core.sequence import Request, RequestSpec, Sequence
from scheduler.core.step import Finish, Update
from scheduler.sessions import Session


def sequence(choice: int = 0) -> Sequence:
    spec = RequestSpec(("g", 7), "m", (1, 2, 3), max_tokens=8, choices=((choice, ()),))
    return Sequence(1, Request(spec, 1, 0.0), choice, ())


def entry(token_id: int) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=-1.0))


async def sent(session: Session) -> Any:
    """The next message, as it arrives."""
    response: Any = session.next_message()
    return scheduler_pb2.SessionResponse.FromString(response.SerializeToString())


async def test_a_token_by_itself_says_nothing_else() -> None:
    session = Session("g")
    session.add_update(7, Update(sequence(), 4, [99]))
    session.add_update(8, Update(sequence(), 0, [98]))
    message = await sent(session)
    plain = scheduler_pb2.PlainOutputs(handles=[7, 8], token_indices=[4, 0], token_ids=[99, 98])
    assert message == scheduler_pb2.SessionResponse(plain_outputs=plain)


def told(**more: Any) -> Sequence:
    """A sequence of which there is something to say besides its tokens."""
    found = sequence()
    for name, value in more.items():
        setattr(found, name, value)
    return found


def cached() -> Sequence:
    found = sequence()
    found.request.cached_tokens = 2
    return found


@pytest.mark.parametrize(
    "update",
    [
        Update(sequence(), 4, [99, 98]),
        Update(sequence(), 4, [], Finish.LENGTH),
        Update(sequence(), 4, [99], Finish.LENGTH),
        Update(sequence(), 4, [99], logprobs=[entry(99)]),
        Update(sequence(), 0, [99], prompt_logprobs=(entry(1),)),
        Update(sequence(choice=1), 4, [99]),
        Update(told(drafted=1), 4, [99]),
        Update(told(resumptions=1), 4, [99]),
        Update(told(crashes=1), 4, [99]),
        Update(cached(), 0, [99]),
    ],
)
async def test_a_token_with_more_to_say_is_an_output(update: Update) -> None:
    session = Session("g")
    session.add_update(7, update)
    message = await sent(session)
    assert len(message.outputs) == 1
    assert not message.HasField("plain_outputs")


async def test_what_was_cached_is_said_with_the_first_token_only() -> None:
    session = Session("g")
    session.add_update(7, Update(cached(), 1, [99]))
    message = await sent(session)
    assert list(message.plain_outputs.token_ids) == [99]
    assert not message.outputs


async def test_what_waits_is_joined_in_order() -> None:
    session = Session("g")
    one, two = sequence(), sequence(choice=2)
    one.drafted, one.accepted, one.resumptions = 5, 3, 1
    one.request.cached_tokens = 16
    session.add_update(7, Update(one, 0, [], prompt_logprobs=(entry(1), entry(2)), first_prompt_position=4))
    session.add_update(7, Update(two, 0, [50]))
    session.add_update(7, Update(one, 0, [10], logprobs=[entry(10)], prompt_logprobs=(entry(3),)))
    session.add_update(7, Update(one, 1, [11, 12], logprobs=[entry(11), entry(12)]))
    session.add_update(7, Update(one, 3, [13], Finish.STOP, [entry(13)]))
    first, second = (await sent(session)).outputs
    assert (first.choice, first.first_token_index, list(first.token_ids)) == (0, 0, [10, 11, 12, 13])
    assert (first.finish_reason, first.stop_token_id) == (types_pb2.FINISH_REASON_STOP, 13)
    assert [position.chosen.token_id for position in first.logprobs] == [10, 11, 12, 13]
    assert [position.chosen.token_id for position in first.prompt_logprobs] == [1, 2, 3]
    assert first.first_prompt_position == 4
    assert (first.cached_tokens, first.drafted_tokens, first.accepted_tokens, first.resumptions) == (16, 5, 3, 1)
    assert (second.choice, list(second.token_ids), second.HasField("stop_token_id")) == (2, [50], False)


async def test_nothing_is_sent_twice() -> None:
    session = Session("g")
    one = sequence()
    session.add_update(7, Update(one, 0, [10, 11]))
    assert list((await sent(session)).outputs[0].token_ids) == [10, 11]
    session.add_update(7, Update(one, 2, [12]))
    session.add_update(7, Update(one, 3, [], Finish.LENGTH))
    (output,) = (await sent(session)).outputs
    assert (output.first_token_index, list(output.token_ids)) == (2, [12])
    assert output.finish_reason == types_pb2.FINISH_REASON_LENGTH
    session.close()
    assert session.next_message() is None


async def test_an_end_without_an_answer_replaces_what_waits() -> None:
    session = Session("g")
    session.add_update(7, Update(sequence(), 0, [10]))
    session.add_failure(7, status_pb2.Status(code=13, message="no"))
    (output,) = (await sent(session)).outputs
    assert (output.handle, output.error.message, list(output.token_ids)) == (7, "no", [])
