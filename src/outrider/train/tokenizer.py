"""The demo's byte-level BPE tokenizer, and documents as token ids.

Contract: `train_tokenizer` sees training text only. `Vocabulary` encodes any text and decodes it back exactly;
ordinary text never yields a special token, even where it spells one. `save_tokenizer` writes the files from which
`AutoTokenizer.from_pretrained(folder)` builds the same tokenizer with the chat template; there, and only there, text
begins with `<|endoftext|>`, as every training document does.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
END = "<|end|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, SYSTEM, END, MASK)  # ids 0..5
VOCABULARY_SIZE = 4096

# A newline run; the indent after it (apart, so that a prompt may end with a newline); a word with the space, dot or
# underscore before it; a short number; a run of punctuation; other blanks.
_PIECES = (
    r"[ \t]*(?:\r?\n)+"
    r"|(?<=\n)[ \t]+"
    r"|[ ._]?\p{L}+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

CHAT_TEMPLATE = (
    "{{- '<|endoftext|>' -}}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Learn the merges; special tokens take the first ids in the order of `SPECIAL_TOKENS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Vocabulary:
    """A tokenizer as training uses it: text to ids without ever reading special tokens out of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True
        self.end_of_text = self._id(END_OF_TEXT)
        self.end = self._id(END)
        self.size = int(self.tokenizer.get_vocab_size())

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer lacks {token}")
        return int(found)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; no special tokens."""
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_chat(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Ids of each (request, answer) in the form that the chat template renders."""
        users = self.encode([user for user, _ in pairs])
        answers = self.encode([answer for _, answer in pairs])
        user, assistant = self._id(USER), self._id(ASSISTANT)
        return [[user, *u, self.end, assistant, *a, self.end] for u, a in zip(users, answers, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text, special tokens spelled out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that `save_tokenizer` wrote."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; `context` is the model's limit in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    begins = Tokenizer.from_str(tokenizer.to_str())
    # A document of the training text stands between two of these, so a prompt begins with one.
    ends = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    begins.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[ends])
    (folder / "tokenizer.json").write_text(begins.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
