"""Tokenizers built from config: ids, round trips, the prefix property, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engines.config import TokenizerConfig
from engines.errors import ConfigError, DataError
from engines.text import PRINTABLE_ASCII, build_tokenizer, decode_response, encode_example, encode_prompt

PHRASE = "Spell this word backward: "
CHAR = build_tokenizer(TokenizerConfig(kind="char", phrases=(PHRASE,)))
BYTE = build_tokenizer(TokenizerConfig(kind="byte", phrases=(PHRASE,)))
ascii_text = st.text(alphabet=PRINTABLE_ASCII)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_char_ids_are_specials_then_phrases_then_alphabet() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", alphabet="abc", phrases=("ab: ",)))
    assert len(tokenizer) == 5 + 1 + 3
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 4)
    assert encode_prompt(tokenizer, user("ab: cab")) == [2, 5, 8, 6, 7, 3]
    assert encode_example(tokenizer, user("ab: cab"), "bac") == ([2, 5, 8, 6, 7, 3, 7, 6, 8, 4], 6)


def test_byte_tokenizer_has_one_id_per_byte() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"))
    assert len(tokenizer) == 5 + 256
    assert encode_prompt(tokenizer, user("a\u00e9")) == [2, 5 + 0x61, 5 + 0xC3, 5 + 0xA9, 3]


def test_system_turn_comes_first() -> None:
    ids = encode_prompt(CHAR, [{"role": "system", "content": ""}, *user("")])
    assert ids == [1, 2, 3]


def test_default_template_marks_the_assistant_tokens() -> None:
    conversation = [*user("x"), {"role": "assistant", "content": "yz"}]
    encoded: Any = CHAR.apply_chat_template(conversation, return_assistant_tokens_mask=True, return_dict=True)
    assert encoded["assistant_masks"] == [0, 0, 0, 1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(question=ascii_text, answer=ascii_text)
def test_prompt_is_a_prefix_and_the_answer_round_trips_char(question: str, answer: str) -> None:
    ids, prompt_length = encode_example(CHAR, user(PHRASE + question), answer)
    assert ids[:prompt_length] == encode_prompt(CHAR, user(PHRASE + question))
    assert ids[-1] == CHAR.eos_token_id
    assert decode_response(CHAR, ids[prompt_length:]) == answer


@settings(max_examples=60, deadline=None)
@given(question=st.text(), answer=st.text())
def test_prompt_is_a_prefix_and_any_answer_round_trips_byte(question: str, answer: str) -> None:
    ids, prompt_length = encode_example(BYTE, user(PHRASE + question), answer)
    assert ids[:prompt_length] == encode_prompt(BYTE, user(PHRASE + question))
    assert decode_response(BYTE, ids[prompt_length:]) == answer


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_saved_and_reloaded_tokenizer_is_identical(kind: str, tmp_path: Path) -> None:
    tokenizer = CHAR if kind == "char" else BYTE
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = PHRASE + "Hello, (world)\n"
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert (again.pad_token_id, again.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert encode_example(again, user(text), "ok") == encode_example(tokenizer, user(text), "ok")
    assert decode_response(again, encode_prompt(again, user(text))) == text


def test_unknown_character_is_named_not_replaced() -> None:
    with pytest.raises(DataError, match=r"no token for '\u00e9', '\u2603' in .*kind: byte"):
        encode_prompt(CHAR, user("caf\u00e9 \u2603"))


def test_unknown_character_is_an_error_for_every_other_caller_too(tmp_path: Path) -> None:
    CHAR.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="Missing"):
        AutoTokenizer.from_pretrained(tmp_path)("caf\u00e9")


def test_template_that_rewrites_the_prompt_is_refused() -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte", chat_template=template))
    with pytest.raises(DataError, match="prefix of prompt and answer 'b': the ids differ at token 1 of 2"):
        encode_example(tokenizer, user("a"), "b")


def test_text_after_the_end_of_turn_is_not_trained() -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>\n{% endif %}{% endfor %}"
    )
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", alphabet="ab\n", chat_template=template))
    assert encode_example(tokenizer, user("a"), "b") == ([5, 6, 4], 1)


def test_missing_chat_template_says_what_to_do() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"))
    tokenizer.chat_template = None
    with pytest.raises(
        ConfigError, match=r"no chat template, .* put one into the model's folder, as chat_template.jinja"
    ):
        encode_prompt(tokenizer, user("a"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TokenizerConfig(kind="char", alphabet="abca"), "'a' is given twice"),
        (TokenizerConfig(phrases=("ab", "ab")), "'ab' is given twice"),
        (TokenizerConfig(phrases=("a",)), "at least two characters"),
        (TokenizerConfig(kind="byte", phrases=("d\u00e9j\u00e0",)), "not ASCII"),
    ],
)
def test_bad_tokenizer_config_is_refused(config: TokenizerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(config)
