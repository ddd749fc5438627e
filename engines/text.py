"""Tokenizers and chat templates: text to ids and back.

Owns: tokenizers built from config, encoding of prompts, conversations and plain text, decoding of responses. Does not
own: where a tokenizer is stored (`engines.hf.model`), or padding (`engines.hf.batch`).
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

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""Descriptions of functions that the assistant may call, for templates that show them."""


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


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools | None = None
) -> list[int]:
    """Ids of a conversation up to where the assistant's turn begins.

    Raises DataError for a character that the tokenizer has no token for.
    """
    return _encode(tokenizer, _render(tokenizer, messages, tools, add_generation_prompt=True))


def encode_example(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answer: str
) -> tuple[list[int], int]:
    """(ids of conversation and answer, end-of-turn token included; prompt length in tokens), for SFT.

    Raises DataError if the template does not render the prompt as a prefix of the whole.
    """
    return encode_continuation(tokenizer, messages, [{"role": "assistant", "content": answer}])


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    continuation: Sequence[Message],
    tools: Tools | None = None,
) -> tuple[list[int], int]:
    """(ids of a conversation and the messages that continue it, end-of-turn token included; prompt length in tokens).

    Raises DataError if the template does not render the prompt as a prefix of the whole.
    """
    prompt = encode_prompt(tokenizer, messages, tools)
    ids = _encode(tokenizer, _render(tokenizer, [*messages, *continuation], tools, add_generation_prompt=False))
    if ids[: len(prompt)] != prompt:
        answer = continuation[-1].get("content") if continuation else ""
        raise DataError(
            f"the chat template does not render the prompt as a prefix of prompt and answer {answer!r}: the ids differ "
            f"at token {_first_difference(ids, prompt)} of {len(prompt)}; use a template that only appends"
        )
    return ids[: _turn_end(tokenizer, ids, len(prompt), len(ids))], len(prompt)


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools | None = None
) -> tuple[list[int], list[bool]]:
    """(ids of a conversation up to the assistant's last token; for each, whether the assistant says it).

    A template that marks generations tells which tokens these are. With any other, each turn is what it adds to the
    conversation before it. Raises DataError if the template rewrites earlier turns, or nobody is an assistant.
    """
    if _GENERATION.search(_template(tokenizer)):
        ids, mask = _marked_turns(tokenizer, messages, tools)
    else:
        ids, mask = _appended_turns(tokenizer, messages, tools)
    if not any(mask):
        roles = [str(message.get("role")) for message in messages]
        raise DataError(
            f"none of the {len(roles)} messages gives an assistant's token to train on; the roles are {roles}"
        )
    last = len(mask) - mask[::-1].index(True)
    return ids[:last], mask[:last]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of plain text, with the special tokens that the tokenizer puts around a document.

    Raises DataError for a character that the tokenizer has no token for.
    """
    return _encode(tokenizer, text, add_special_tokens=True)


def decode_response(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> str:
    """Text of a response, without special tokens."""
    ids = [int(token) for token in tokens]
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template, so no task can be asked; put one into the model's folder, as "
            "chat_template.jinja"
        )
    return str(tokenizer.chat_template)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools | None,
    *,
    add_generation_prompt: bool,
) -> str:
    _template(tokenizer)
    return str(_applied(tokenizer, messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt))


def _applied(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools | None, **options: Any
) -> Any:
    from jinja2 import TemplateError

    conversation = [dict(message) for message in messages]
    given: Any = None if tools is None else [dict(tool) for tool in tools]
    try:
        return tokenizer.apply_chat_template(conversation, tools=given, **options)
    except (TemplateError, TypeError) as error:  # TypeError: the template joins what is no text
        raise ConfigError(
            f"the tokenizer's chat template cannot render {conversation}: {error}; correct it: chat_template.jinja of "
            "the model's folder, or model.tokenizer.chat_template"
        ) from error


def _marked_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools | None
) -> tuple[list[int], list[bool]]:
    """By the template's own `{% generation %}`."""
    _refuse_unknown(tokenizer, _render(tokenizer, messages, tools, add_generation_prompt=False))
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "add_generation_prompt": False}
    encoded = _applied(tokenizer, messages, tools, **options)
    return [int(token) for token in encoded["input_ids"]], [bool(bit) for bit in encoded["assistant_masks"]]


def _appended_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools | None
) -> tuple[list[int], list[bool]]:
    """By what each turn adds; what a template writes behind the end of a turn is not the assistant's."""
    ids = _encode(tokenizer, _render(tokenizer, messages, tools, add_generation_prompt=False))
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start = encode_prompt(tokenizer, messages[:index], tools) if index else []
        until = _encode(tokenizer, _render(tokenizer, messages[: index + 1], tools, add_generation_prompt=False))
        for part in (start, until):
            if ids[: len(part)] != part:
                raise DataError(
                    f"the chat template rewrites earlier turns: the ids up to message {index + 1} of {len(messages)} "
                    f"differ from those of the whole conversation at token {_first_difference(ids, part)}; use a "
                    "template that marks the assistant's tokens with {% generation %}, or one that only appends"
                )
        end = _turn_end(tokenizer, ids, len(start), len(until))
        mask[len(start) : end] = [True] * (end - len(start))
    return ids, mask


def _turn_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, stop: int) -> int:
    """Position behind the last end-of-turn token within [start, stop); `stop` if there is none."""
    end = tokenizer.eos_token_id
    return next((index + 1 for index in range(stop - 1, start - 1, -1) if ids[index] == end), stop)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False) -> list[int]:
    _refuse_unknown(tokenizer, text)
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


def _refuse_unknown(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    if unknown := _unknown_characters(tokenizer, text):
        shown = ", ".join(repr(character) for character in unknown)
        raise DataError(
            f"no token for {shown} in {text!r}; add it to model.tokenizer.alphabet or use model.tokenizer.kind: byte"
        )


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
