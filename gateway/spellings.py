"""The ways in which a vocabulary can spell a text.

A word is banned by banning the last token of each id sequence that spells it. The tokenizer's own spelling alone would
not do: with "Rome" banned as one token, a model writes "R", "ome". So every spelling is listed, shortest first, up to a
limit that only long words reach; those beyond it are the ones of many tiny tokens, which models don't produce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

# Search effort per word; a bound for hostile input.
_MAX_VISITS = 20_000


def spellings(target: bytes, ids_of: Mapping[bytes, Sequence[int]], longest: int, limit: int) -> list[tuple[int, ...]]:
    """Up to `limit` id sequences whose bytes are `target`, fewest tokens first.

    `ids_of`: the ids of each token's bytes; `longest`: the most bytes of any token.
    """
    size = len(target)
    # ends[i]: where a token that starts at byte i may end. fewest[i]: tokens needed from byte i on.
    ends: list[list[int]] = [[] for _ in range(size)]
    unreachable = size + 1
    fewest = [unreachable] * size + [0]
    for begin in range(size - 1, -1, -1):
        for end in range(min(size, begin + longest), begin, -1):
            if target[begin:end] in ids_of and fewest[end] < unreachable:
                ends[begin].append(end)
                fewest[begin] = min(fewest[begin], fewest[end] + 1)
    if size == 0 or fewest[0] >= unreachable:
        return []

    visits = 0

    def walk(begin: int, num_left: int) -> Iterator[tuple[int, ...]]:
        nonlocal visits
        visits += 1
        if begin == size:
            yield ()
            return
        for end in ends[begin]:
            if fewest[end] > num_left - 1 or size - end < num_left - 1 or visits > _MAX_VISITS:
                continue
            for rest in walk(end, num_left - 1):
                for token_id in ids_of[target[begin:end]]:
                    yield (token_id, *rest)

    found: list[tuple[int, ...]] = []
    for num_tokens in range(fewest[0], size + 1):
        for sequence in walk(0, num_tokens):
            if len(sequence) == num_tokens:
                found.append(sequence)
            if len(found) == limit:
                return found
    return found
