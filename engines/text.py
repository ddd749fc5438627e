"""Tokenizers and chat templates: text to ids and back.

Owns: tokenizers built from config, encoding of prompts and SFT examples, decoding of responses. Does not own: where a
tokenizer is stored (`engines.hf.model`), or padding (`engines.hf.batch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engines.config import TokenizerConfig
from engines.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    Tokenizer = PreTrainedTokenizerBase
else:
    Tokenizer = Any
"""Any Hugging Face tokenizer; an alias, so that callers need not import transformers."""

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, END)
PRINTABLE_ASCII = "".join(chr(code) for code in range(32, 127)) + "\n"

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% elif message['role'] in ('system', 'user') %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% else %}{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Message = Mapping[str, Any]


def build_tokenizer(config: TokenizerConfig) -> PreTrainedTokenizerFast:
    """A tokenizer from nothing: special tokens first, then phrases, then characters or bytes.

    Raises ConfigError for an alphabet or phrases that could not be decoded again.
    """
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    _check_phrases(config)
    units = _alphabet(config) if config.kind == "char" else _byte_symbols()
    first = len(SPECIAL_TOKENS) + len(config.phrases)
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *config.phrases))}
    vocab |= {unit: first + index for index, unit in enumerate(units)}
    backend = Tokenizer(_char_model(vocab) if config.kind == "char" else _byte_model(vocab))
    _set_stages(backend, config.kind)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in config.phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=config.chat_template or DEFAULT_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation up to where the assistant's turn begins.

    Raises DataError for a character that the tokenizer has no token for.
    """
    return _encode(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))


def encode_example(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answer: str
) -> tuple[list[int], int]:
    """(ids of conversation and answer, end-of-turn token included; prompt length in tokens), for SFT.

    Raises DataError if the template does not render the prompt as a prefix of the whole.
    """
    prompt = encode_prompt(tokenizer, messages)
    turn = {"role": "assistant", "content": answer}
    ids = _encode(tokenizer, _render(tokenizer, [*messages, turn], add_generation_prompt=False))
    if ids[: len(prompt)] != prompt:
        raise DataError(
            f"the chat template does not render the prompt as a prefix of prompt and answer {answer!r}: the ids differ "
            f"at token {_first_difference(ids, prompt)} of {len(prompt)}; use a template that only appends"
        )
    end = tokenizer.eos_token_id
    if end is not None and end in ids[len(prompt) :]:
        ids = ids[: len(ids) - ids[::-1].index(end)]
    return ids, len(prompt)


def decode_response(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> str:
    """Text of a response, without special tokens."""
    ids = [int(token) for token in tokens]
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template, so no task can be asked; put one into the model's folder, as "
            "chat_template.jinja"
        )
    conversation = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise ConfigError(
            f"the tokenizer's chat template cannot render {conversation}: {error}; correct it: chat_template.jinja of "
            "the model's folder, or model.tokenizer.chat_template"
        ) from error
    return str(text)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if unknown := _unknown_characters(tokenizer, text):
        shown = ", ".join(repr(character) for character in unknown)
        raise DataError(
            f"no token for {shown} in {text!r}; add it to model.tokenizer.alphabet or use model.tokenizer.kind: byte"
        )
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _unknown_characters(tokenizer: Any, text: str) -> list[str]:
    """Characters that a char tokenizer would refuse; none for any other kind."""
    from tokenizers.models import WordLevel

    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if not isinstance(model, WordLevel):
        return []
    whole = sorted((re.escape(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
    rest = re.sub("|".join(whole), "", text) if whole else text
    return sorted(character for character in set(rest) if model.token_to_id(character) is None)


def _check_phrases(config: TokenizerConfig) -> None:
    if duplicates := {phrase for phrase in config.phrases if config.phrases.count(phrase) > 1}:
        raise ConfigError(f"model.tokenizer.phrases: {sorted(duplicates)[0]!r} is given twice")
    for phrase in config.phrases:
        if len(phrase) < 2 or phrase in SPECIAL_TOKENS:
            raise ConfigError(
                f"model.tokenizer.phrases: {phrase!r} must be at least two characters, and no special token"
            )
        if config.kind == "byte" and not phrase.isascii():
            raise ConfigError(f"model.tokenizer.phrases: {phrase!r} is not ASCII, which a byte tokenizer cannot decode")


def _alphabet(config: TokenizerConfig) -> list[str]:
    alphabet = config.alphabet or PRINTABLE_ASCII
    if len(set(alphabet)) != len(alphabet):
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        raise ConfigError(f"model.tokenizer.alphabet: {repeated[0]!r} is given twice")
    return list(alphabet)


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in the order of their bytes."""
    direct = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [byte for byte in range(256) if byte not in direct]
    symbol = {byte: chr(byte) for byte in direct} | {byte: chr(256 + index) for index, byte in enumerate(rest)}
    return [symbol[byte] for byte in range(256)]


def _char_model(vocab: dict[str, int]) -> Any:
    from tokenizers.models import WordLevel

    # No unknown token on purpose: an unknown character raises in every path, ours and that of other users.
    return WordLevel(vocab, unk_token="<|no such token|>")


def _byte_model(vocab: dict[str, int]) -> Any:
    from tokenizers.models import BPE

    return BPE(vocab=vocab, merges=[])


def _set_stages(backend: Any, kind: str) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    if kind == "char":
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
