"""Records become rows: which tokens train, which identity a row has, what is refused and how it is named."""

from typing import Any

import numpy as np
import pytest

from engines.config import TokenizerConfig
from engines.errors import ConfigError, DataError
from engines.experience import EID, Experience
from engines.text import build_tokenizer, encode_turns
from trinity_tasks.buffer.row_checks import RowLimits
from trinity_tasks.offline.config import OfflineConfig
from trinity_tasks.offline.formats import RecordFormat
from trinity_tasks.offline.sources import Record

# ids: pad 0, system 1, user 2, assistant 3, end 4, then a = 5, b = 6, c = 7, d = 8
TOKENIZER = build_tokenizer(TokenizerConfig(kind="char", alphabet="abcd\n"))
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Without marks of generations, and with a line end behind a turn that the model does not write."""
TALK = [
    {"role": "system", "content": "d"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bb"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def row_of(
    content: dict[str, Any], limits: RowLimits | None = None, index: int = 0, **config: Any
) -> Experience | None:
    made = RecordFormat(OfflineConfig(path="x", **config), TOKENIZER, limits or RowLimits(), "sha")
    return made.row(Record("chats.jsonl line 7", content), index)


def kept(content: dict[str, Any], **config: Any) -> Experience:
    row = row_of(content, **config)
    assert row is not None
    return row


def test_sft_on_messages_trains_the_last_turn_only() -> None:
    row = kept({"messages": TALK})
    assert row.tokens.tolist() == [1, 8, 2, 5, 3, 6, 6, 4, 2, 7, 3, 8, 4]
    assert (row.prompt_length, row.experience_type) == (11, "single_turn")
    assert row.action_mask is not None
    assert row.action_mask.tolist() == [True, True]
    assert row.info == {"is_expert": True, "source": "chats.jsonl line 7"}
    assert (row.response_text, row.messages, row.reward) == ("d", TALK, None)


@pytest.mark.parametrize("template", [None, CHATML])
def test_multi_turn_trains_every_turn_of_the_assistant(template: str | None) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", alphabet="abcd\n", chat_template=template))
    made = RecordFormat(OfflineConfig(path="x", multi_turn=True), tokenizer, RowLimits(), "sha")
    row = made.row(Record("w", {"messages": TALK}), 0)
    assert row is not None
    gap = [9] if template else []
    assert row.tokens.tolist() == [1, 8, 2, 5, 3, 6, 6, 4, *gap, 2, 7, 3, 8, 4]
    assert (row.prompt_length, row.experience_type) == (5, "multi_turn")
    assert row.action_mask is not None
    assert row.action_mask.tolist() == [True] * 3 + [False] * (3 + len(gap)) + [True] * 2


def test_what_follows_the_last_turn_of_the_assistant_is_left_out() -> None:
    assert encode_turns(TOKENIZER, TALK[:4])[0] == [1, 8, 2, 5, 3, 6, 6, 4]


def test_a_conversation_that_the_assistant_begins_has_a_first_token_that_nothing_predicts() -> None:
    template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", alphabet="ab", chat_template=template))
    made = RecordFormat(OfflineConfig(path="x", multi_turn=True), tokenizer, RowLimits(), "sha")
    row = made.row(Record("w", {"messages": [{"role": "assistant", "content": "ab"}]}), 0)
    assert row is not None
    assert (row.tokens.tolist(), row.prompt_length) == ([5, 6, 4], 1)
    assert row.action_mask is not None
    assert row.action_mask.tolist() == [True, True]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% elif loop.last %}b"
        "{{ m['content'] }}<|end|>{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    )
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", alphabet="abcd", chat_template=template))
    with pytest.raises(DataError, match=r"rewrites earlier turns: the ids up to message 3 of 5 differ .* at token"):
        encode_turns(tokenizer, TALK)


def test_messages_may_be_the_json_of_a_list() -> None:
    written = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    assert kept({"talk": written}, messages_key="talk").tokens.tolist() == [2, 5, 3, 6, 4]


def test_tools_reach_the_template() -> None:
    template = "{% for t in tools %}{{ t['name'] }}{% endfor %}" + CHATML
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", alphabet="abcd\n", chat_template=template))
    made = RecordFormat(OfflineConfig(path="x"), tokenizer, RowLimits(), "sha")
    row = made.row(Record("w", {"messages": TALK[1:3], "tools": '[{"name": "dd"}]'}), 0)
    assert row is not None
    assert row.tokens.tolist() == [8, 8, 2, 5, 3, 6, 6, 4]
    assert row.tools == [{"name": "dd"}]


@pytest.mark.parametrize(
    ("config", "system"), [({}, []), ({"system_prompt": "d"}, [1, 8]), ({"system_prompt_key": "s"}, [1, 7])]
)
def test_sft_on_plaintext(config: dict[str, Any], system: list[int]) -> None:
    row = kept({"prompt": "a", "response": "bb", "s": "c"}, prompt_type="plaintext", **config)
    assert row.tokens.tolist() == [*system, 2, 5, 3, 6, 6, 4]
    assert row.prompt_length == len(system) + 3
    assert (row.prompt_text, row.response_text) == ("a", "bb")


def test_cpt_trains_all_but_the_first_token() -> None:
    row = kept({"text": "abcd"}, schema_type="cpt", prompt_key="text")
    assert (row.tokens.tolist(), row.prompt_length) == ([5, 6, 7, 8], 1)
    assert row.action_mask is not None
    assert row.action_mask.tolist() == [True] * 3


@pytest.mark.parametrize(
    ("config", "record"),
    [
        ({"prompt_type": "plaintext"}, {"prompt": "a", "chosen": "bb", "rejected": "c"}),
        ({}, {"messages": TALK[1:2], "chosen": [TALK[2]], "rejected": [{"role": "assistant", "content": "c"}]}),
        ({}, {"messages": TALK[1:2], "chosen": "bb", "rejected": "c"}),
    ],
)
def test_dpo_is_a_prompt_and_two_responses_without_it(config: dict[str, Any], record: dict[str, Any]) -> None:
    row = kept(record, schema_type="dpo", **config)
    assert (row.experience_type, row.prompt_length) == ("dpo", 3)
    assert row.tokens.tolist() == [2, 5, 3]
    assert row.chosen is not None
    assert row.rejected is not None
    assert (row.chosen.tolist(), row.rejected.tolist()) == ([6, 6, 4], [7, 4])
    assert row.chosen_messages == [TALK[1], TALK[2]]
    assert row.info["is_expert"] is True


def test_each_record_is_a_group_and_its_identity_follows_from_content_and_index() -> None:
    record = {"prompt": "a", "response": "b"}
    config: dict[str, Any] = {"prompt_type": "plaintext", "rows_per_shard": 4}
    first, again, other = (kept(record, index=index, **config).eid for index in (9, 9, 10))
    assert first == again == EID(batch="import-2", task=9, suffix=first.suffix)
    assert len(first.suffix) == 6
    assert (other.task, other.suffix) != (9, first.suffix)


LONG = {"prompt": "a", "response": "bbbb"}  # 3 tokens of prompt, 5 of response


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (RowLimits(max_prompt_tokens=2), "the prompt has 3 tokens, max_prompt_tokens is 2"),
        (RowLimits(max_response_tokens=4), "the response has 5 tokens, max_response_tokens is 4"),
        (RowLimits(max_model_len=7), "prompt and response have 8 tokens, max_model_len is 7"),
    ],
)
def test_a_row_that_is_too_long_is_refused_or_dropped(limits: RowLimits, reason: str) -> None:
    with pytest.raises(DataError, match=rf"chats\.jsonl line 7: {reason}; .* set too_long"):
        row_of(LONG, limits, prompt_type="plaintext")
    assert row_of(LONG, limits, prompt_type="plaintext", too_long="drop") is None
    fits = RowLimits(max_prompt_tokens=3, max_response_tokens=5, max_model_len=8)
    assert row_of(LONG, fits, prompt_type="plaintext") is not None


@pytest.mark.parametrize("limits", [RowLimits(max_response_tokens=4), RowLimits(max_model_len=7)])
def test_truncation_cuts_the_response(limits: RowLimits) -> None:
    row = row_of(LONG, limits, prompt_type="plaintext", too_long="truncate")
    assert row is not None
    assert row.tokens.tolist() == [2, 5, 3, 6, 6, 6, 6]
    assert (row.prompt_length, row.truncate_status) == (3, "response_truncated")
    pair = {"prompt": "a", "chosen": "bbbb", "rejected": "c"}
    row = row_of(pair, limits, schema_type="dpo", prompt_type="plaintext", too_long="truncate")
    assert row is not None
    assert row.chosen is not None
    assert row.rejected is not None
    assert (row.chosen.tolist(), row.rejected.tolist()) == ([6, 6, 6, 6], [7, 4])


def test_truncation_drops_what_would_not_train() -> None:
    assert row_of(LONG, RowLimits(max_prompt_tokens=2), prompt_type="plaintext", too_long="truncate") is None
    assert row_of(LONG, RowLimits(max_model_len=3), prompt_type="plaintext", too_long="truncate") is None


def test_a_token_beyond_the_vocabulary_is_refused_with_its_record() -> None:
    with pytest.raises(DataError, match=r"chats\.jsonl line 7: .*tokens\[3\] is 6; the vocabulary has ids 0 to 5"):
        row_of(LONG, RowLimits(vocab_size=6), prompt_type="plaintext")


@pytest.mark.parametrize(
    ("config", "content", "message"),
    [
        ({}, {"chat": []}, r"messages is missing; the record has chat\. Correct the key"),
        ({}, {"messages": None}, "messages is missing"),
        ({}, {"messages": []}, r"messages is a list, \[\]; it must be a list of objects"),
        ({}, {"messages": "[{]"}, "messages is a str, .* or the JSON of one"),
        ({}, {"messages": ["a"]}, r"messages\[0\] is a str, 'a'; it must be an object"),
        ({}, {"messages": [{"content": "a"}]}, r"messages\[0\] is a dict, .* it needs a role"),
        ({}, {"messages": [{"role": "user"}]}, r"messages\[0\] has a content that is a NoneType, None"),
        ({}, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"a list, .*Join lists of parts"),
        ({}, {"messages": TALK[:2]}, r"messages ends with a message of role 'user'"),
        ({"multi_turn": True}, {"messages": TALK[:2]}, r"none of the 2 messages .* \['system', 'user'\]"),
        ({"prompt_type": "plaintext"}, {"prompt": "a"}, "response is missing; the record has prompt"),
        ({"prompt_type": "plaintext"}, {"prompt": 3, "response": "a"}, "prompt is a int, 3; it must be text"),
        ({"prompt_type": "plaintext"}, {"prompt": "x", "response": "a"}, "no token for 'x'"),
        ({"schema_type": "cpt"}, {"prompt": "a"}, "1 tokens with 1 of a prompt leave none to train on"),
        ({"schema_type": "cpt"}, {"prompt": ""}, "0 tokens"),
        (
            {"schema_type": "dpo"},
            {"messages": TALK[1:2], "chosen": TALK[1:3], "rejected": "c"},
            "chosen begins with a message of role 'user'; it must hold only what follows messages",
        ),
        ({"schema_type": "dpo", "prompt_type": "plaintext"}, {"prompt": "a", "chosen": "b"}, "rejected is missing"),
    ],
)
def test_a_record_that_does_not_fit_is_named(config: dict[str, Any], content: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^chats\.jsonl line 7: .*{message}"):
        row_of(content, **config)


def test_a_template_that_cannot_render_a_record_is_a_config_error_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"^chats\.jsonl line 7: .*unknown role judge"):
        row_of({"messages": [{"role": "judge", "content": "a"}, TALK[2]]})


def test_a_template_that_rewrites_the_prompt_is_refused_with_the_record() -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}d{% endif %}"
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", alphabet="abcd", chat_template=template))
    made = RecordFormat(OfflineConfig(path="x", prompt_type="plaintext"), tokenizer, RowLimits(), "sha")
    with pytest.raises(
        DataError, match=r"^part row 3: .*prefix of prompt and answer 'b'.*a template that only appends"
    ):
        made.row(Record("part row 3", {"prompt": "a", "response": "b"}), 0)


@pytest.mark.parametrize(
    "config", [{"multi_turn": True, "schema_type": "dpo"}, {"multi_turn": True, "prompt_type": "plaintext"}]
)
def test_multi_turn_needs_conversations(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="multi_turn trains every assistant's turn"):
        OfflineConfig(path="x", **config)


def test_rows_are_plain_arrays_of_their_own() -> None:
    row = kept({"prompt": "a", "response": "b"}, prompt_type="plaintext")
    assert (row.tokens.dtype, row.tokens.flags.writeable) == (np.dtype(np.int32), True)
