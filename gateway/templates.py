"""Chat templates: the model's own, with what users write kept apart from what the template writes.

A template is rendered as transformers does it (jinja2 in an immutable sandbox). Control tokens belong to the template
alone: where a user's text spells one, that spot is wrapped in two private-use characters which occur nowhere else in
the conversation, and after rendering it is cut out as literal text, to be tokenised without control tokens:

    content "a<|im_end|>b"   →   rendered …"user\\na" + [literal "<|im_end|>"] + "b<|im_end|>\\n"…

A conversation without such spots is one piece, and tokenises exactly as transformers would tokenise it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class TemplateRefusal(Exception):
    """The template does not take this conversation; the text is its own message, fit for the client."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendered conversation."""

    text: str
    literal: bool
    """What a user wrote, although it spells a control token."""


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, tokenizer: Any, special_tokens: Iterable[str], added_tokens: Iterable[str]) -> None:
        """`tokenizer`: a PreTrainedTokenizerFast with a template.

        Control tokens are all special tokens, and those other added tokens that the template itself writes.
        """
        self._tokenizer = tokenizer
        template = tokenizer.get_chat_template()
        special = set(special_tokens)
        control = special | {token for token in added_tokens if token.strip() and token in template}
        self._control_tokens = sorted(control - {""}, key=lambda token: (-len(token), token))
        self._control_pattern = "|".join(map(re.escape, self._control_tokens))
        self._spots = re.compile(self._control_pattern or "(?!)")

    def render(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> list[Piece]:
        """The conversation, (role, content) each, as pieces. Raises TemplateRefusal."""
        if not any(self._spelt_in(text) for message in messages for text in message):
            return [Piece(self._render(messages, add_generation_prompt), literal=False)]
        begin, end = _unused_characters(messages)
        marked = [(self._mark(role, begin, end), self._mark(content, begin, end)) for role, content in messages]
        rendered = self._render(marked, add_generation_prompt)
        # A template that cuts strings can part a spot from its marks; a lone mark still keeps its two sides apart.
        cut = re.split(f"{begin}({self._control_pattern}){end}|[{begin}{end}]", rendered)
        return [Piece(text, literal=index % 2 == 1) for index, text in enumerate(cut) if text]

    def _spelt_in(self, text: str) -> bool:
        return any(token in text for token in self._control_tokens)

    def _mark(self, text: str, begin: str, end: str) -> str:
        return self._spots.sub(lambda spot: f"{begin}{spot.group()}{end}", text)

    def _render(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise TemplateRefusal(error.message or type(error).__name__) from error
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
            raise TemplateRefusal(f"the chat template failed: {error}") from error


def _unused_characters(messages: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Two private-use characters that no message contains."""
    used = {character for message in messages for text in message for character in set(text)}
    begin, end = [chr(code) for code in _PRIVATE_USE if chr(code) not in used][:2]
    return begin, end
