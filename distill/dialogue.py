"""A target's chat template, cut into what stands before, between and after the texts of a conversation."""

from __future__ import annotations

from typing import Any

_MARK = "\u241f\u241f"
"""stands for a text while the template is rendered"""


class Dialogue:
    """Renders one conversation piece by piece, so that answers keep the very tokens that the target chose."""

    def __init__(self, tokenizer: Any) -> None:
        """A transformers tokenizer; one without a chat template gets prompts as plain text."""
        self._tokenizer = tokenizer
        self.has_template = bool(tokenizer.chat_template)
        if not self.has_template:
            self.before, self._after_user = "", "\n"
            return
        opening = self._render([("user", _MARK)])
        self.before, self._after_user = opening.split(_MARK, 1)
        """what precedes the first user's text"""

    def first(self, text: str) -> list[int]:
        """Everything up to the first answer."""
        return self.encode(self.before + text + self._after_user)

    def before_user(self) -> list[int]:
        """Everything up to a first text that the target is to write in the user's place."""
        return self.encode(self.before)

    def after_user(self) -> list[int]:
        """What follows such a text."""
        return self.encode(self._after_user)

    def next(self, text: str, *, ended: bool) -> list[int]:
        """What follows an answer, up to the next one. `ended`: the answer's last token ends it already."""
        if not self.has_template:
            return self.encode(f"\n{text}{self._after_user}")
        rendered = self._render([("user", "x"), ("assistant", _MARK), ("user", text)])
        ids = self.encode(rendered.split(_MARK, 1)[1])
        return ids[1:] if ended else ids

    def encode(self, text: str) -> list[int]:
        """Token ids, nothing added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=not self.has_template).input_ids
        return ids

    def _render(self, turns: list[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text
