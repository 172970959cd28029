"""Text to token ids and back, through transformers' tokenizers; ids alone work without one."""

import sys
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from outrider.errors import RequestError

Messages = list[dict[str, str]]

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # without any, transformers makes an empty tokenizer


class Tokenizer:
    """The tokenizer of the checkpoint in `folder`; loaded on first use, never executing the checkpoint's code.

    Raises: RequestError on use if the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: Any = None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds by itself.

        Raises: RequestError if the text is not valid Unicode (a lone surrogate, say).
        """
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, messages: Messages) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        Raises: RequestError if the tokenizer has no chat template, or it refuses these messages.
        """
        self.check_chat()
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise RequestError(f"the chat template of {self._folder} refuses this conversation: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def mask_token_id(self) -> int | None:
        """The token that stands for a blank; None if there is none."""
        return self._tokenizer.mask_token_id  # type: ignore[no-any-return]

    def check_chat(self) -> None:
        """Raises: RequestError if conversations cannot be encoded at all."""
        if not self._tokenizer.chat_template:
            raise RequestError(f"the tokenizer in {self._folder} has no chat template; use 'generate' instead")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode at character {error.start}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            if not any((self._folder / file).exists() for file in _FILES):
                raise RequestError(f"{self._folder} has no tokenizer; give token ids (--prompt-ids) instead of text")
            # transformers takes a second to import and is needed for text only.
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
            except Exception as error:  # the tokenizers library raises nothing narrower for a bad file
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise RequestError(
                    f"{self._folder} has no usable tokenizer ({reason}); give --prompt-ids instead"
                ) from error
            self._loaded.model_max_length = sys.maxsize  # the engine checks lengths, in one sentence
        return self._loaded


class TextStream:
    """Turns tokens that arrive one by one into text, holding back bytes of unfinished characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoding restarts here: one token before what is still open
        self._shown = 0  # ids whose text is out

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty."""
        self._ids.append(token)
        shown = self._tokenizer.decode(self._ids[self._start : self._shown])
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith("�"):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(shown) :]

    def flush(self) -> str:
        """What was held back, unfinished or not."""
        shown = self._tokenizer.decode(self._ids[self._start : self._shown])
        self._shown = len(self._ids)
        return self._tokenizer.decode(self._ids[self._start :])[len(shown) :]
