"""A record becomes a row: conversations, texts and pairs as tokens, masks and identities.

Owns: which key of a record means what, which tokens train, what happens to a row that is too long. Does not own: chat
templates (`engines.text`), where records come from (`sources.py`), shards (`importer.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from engines.errors import ConfigError, DataError
from engines.experience import EID, Experience
from engines.text import Tokenizer, encode_continuation, encode_text, encode_turns
from trinity_tasks.buffer.row_checks import RowLimits, limit_fault, validate
from trinity_tasks.offline.config import OfflineConfig
from trinity_tasks.offline.sources import Record

Messages = list[dict[str, Any]]


class RecordFormat:
    """Makes rows of records. Each row is a group of its own, and equal data gives equal rows.

    Example:
        >>> record = Record("chats.jsonl line 1", {"prompt": "2+2", "response": "4"})
        >>> config = OfflineConfig(path="chats.jsonl", prompt_type="plaintext")
        >>> RecordFormat(config, tokenizer, RowLimits(), "").row(record, 0).response_text   # doctest: +SKIP
        '4'
    """

    def __init__(self, config: OfflineConfig, tokenizer: Tokenizer, limits: RowLimits, content_sha256: str) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._limits = limits
        self._content = content_sha256
        self._make = {"sft": self._sft, "cpt": self._cpt, "dpo": self._dpo}[config.schema_type]

    def row(self, record: Record, index: int) -> Experience | None:
        """The row of record `index` of the data; None if it is dropped for its length.

        Raises DataError and ConfigError that name the record's place.
        """
        digest = hashlib.sha256(f"{self._content}/{index}".encode()).hexdigest()
        eid = EID(batch=f"import-{index // self._config.rows_per_shard}", task=index, suffix=digest[:6])
        try:
            row = self._make(record.content, eid)
            if not self._fits(row):
                return None
            row.info = {"is_expert": True, "source": record.where}
            validate([row], self._limits)
        except (DataError, ConfigError) as error:
            raise type(error)(f"{record.where}: {error}") from error
        return row

    # -- what the algorithms train on ---------------------------------------------------------------------------------

    def _sft(self, content: Mapping[str, Any], eid: EID) -> Experience:
        if self._config.prompt_type == "plaintext":
            return self._answered(content, eid)
        messages = self._messages(content, self._config.messages_key)
        tools = self._tools(content)
        if self._config.multi_turn:
            tokens, mask = encode_turns(self._tokenizer, messages, tools)
            start = max(mask.index(True), 1)
            return Experience(
                tokens=np.asarray(tokens, np.int32),
                prompt_length=start,
                action_mask=np.asarray(mask[start:], np.bool_),
                eid=eid,
                messages=messages,
                tools=tools,
            )
        if (role := messages[-1]["role"]) != "assistant":
            raise DataError(
                f"{self._config.messages_key} ends with a message of role {role!r}; the last one is what is trained, "
                "and must be the assistant's"
            )
        tokens, prompt_length = encode_continuation(self._tokenizer, messages[:-1], messages[-1:], tools)
        row = _single_turn(tokens, prompt_length, eid)
        row.messages, row.tools, row.response_text = messages, tools, messages[-1].get("content")
        return row

    def _answered(self, content: Mapping[str, Any], eid: EID) -> Experience:
        prompt, response = (_text(content, key) for key in (self._config.prompt_key, self._config.response_key))
        answer = [{"role": "assistant", "content": response}]
        tokens, prompt_length = encode_continuation(self._tokenizer, self._asked(content), answer)
        row = _single_turn(tokens, prompt_length, eid)
        row.prompt_text, row.response_text = prompt, response
        return row

    def _cpt(self, content: Mapping[str, Any], eid: EID) -> Experience:
        return _single_turn(encode_text(self._tokenizer, _text(content, self._config.prompt_key)), 1, eid)

    def _dpo(self, content: Mapping[str, Any], eid: EID) -> Experience:
        asked: Messages
        if self._config.prompt_type == "plaintext":
            asked, tools = self._asked(content), None
        else:
            asked, tools = self._messages(content, self._config.messages_key), self._tools(content)
        keys = (self._config.chosen_key, self._config.rejected_key)
        answers = [self._response(content, key) for key in keys]
        encoded = [encode_continuation(self._tokenizer, asked, answer, tools) for answer in answers]
        length = encoded[0][1]
        for key, (tokens, _) in zip(keys, encoded, strict=True):
            if len(tokens) == length:
                raise DataError(f"{key} has no tokens to train on behind the {length} of the prompt")
        chosen, rejected = (np.asarray(tokens[length:], np.int32) for tokens, _ in encoded)
        return Experience(
            tokens=np.asarray(encoded[0][0][:length], np.int32),
            chosen=chosen,
            rejected=rejected,
            eid=eid,
            tools=tools,
            chosen_messages=[*asked, *answers[0]],
            rejected_messages=[*asked, *answers[1]],
        )

    # -- keys of a record ---------------------------------------------------------------------------------------------

    def _asked(self, content: Mapping[str, Any]) -> Messages:
        """The conversation that the texts of a record make."""
        system = self._config.system_prompt
        if (key := self._config.system_prompt_key) is not None:
            system = _text(content, key)
        question = {"role": "user", "content": _text(content, self._config.prompt_key)}
        return [question] if system is None else [{"role": "system", "content": system}, question]

    def _messages(self, content: Mapping[str, Any], key: str) -> Messages:
        return _checked_messages(_parsed_list(_value(content, key), key), key)

    def _response(self, content: Mapping[str, Any], key: str) -> Messages:
        value = _value(content, key)
        if self._config.prompt_type == "plaintext":
            return [{"role": "assistant", "content": _text(content, key)}]
        if isinstance(value, str) and not value.lstrip().startswith("["):
            return [{"role": "assistant", "content": value}]
        messages = _checked_messages(_parsed_list(value, key), key)
        if (role := messages[0]["role"]) != "assistant":
            raise DataError(
                f"{key} begins with a message of role {role!r}; it must hold only what follows "
                f"{self._config.messages_key}, beginning with the assistant's"
            )
        return messages

    def _tools(self, content: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        key = self._config.tools_key
        if not content.get(key):
            return None
        return _parsed_list(content[key], key)

    # -- length -------------------------------------------------------------------------------------------------------

    def _fits(self, row: Experience) -> bool:
        """False if the row is to be dropped. One that may be truncated is."""
        fault = limit_fault(row, self._limits)
        if fault is None or self._config.too_long == "drop":
            return fault is None
        if self._config.too_long == "refuse":
            raise DataError(f"{fault}; raise the model's limit, or set too_long to drop or truncate")
        return _truncate(row, self._limits)


def _single_turn(tokens: Sequence[int], prompt_length: int, eid: EID) -> Experience:
    if len(tokens) <= prompt_length:
        raise DataError(f"{len(tokens)} tokens with {prompt_length} of a prompt leave none to train on; leave it out")
    return Experience(tokens=np.asarray(tokens, np.int32), prompt_length=prompt_length, eid=eid)


def _truncate(row: Experience, limits: RowLimits) -> bool:
    """Cut the response to what the limits leave; False if they leave nothing that trains."""
    prompt = row.prompt_length
    rooms = [limits.max_response_tokens, None if limits.max_model_len is None else limits.max_model_len - prompt]
    room = min((room for room in rooms if room is not None), default=0)
    if room < 1 or (limits.max_prompt_tokens is not None and prompt > limits.max_prompt_tokens):
        return False
    row.truncate_status = "response_truncated"
    if row.chosen is not None and row.rejected is not None:
        row.chosen, row.rejected = row.chosen[:room], row.rejected[:room]
        return True
    row.tokens = row.tokens[: prompt + room]
    row.action_mask = cast("Any", row.action_mask)[:room]
    return bool(np.any(row.action_mask))


def _value(content: Mapping[str, Any], key: str) -> Any:
    if content.get(key) is None:
        raise DataError(
            f"{key} is missing; the record has {', '.join(map(str, content)) or 'no keys'}. Correct the key"
        )
    return content[key]


def _text(content: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := _value(content, key), str):
        raise DataError(f"{key} is {_shown(value)}; it must be text")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) <= 80 else text[:77] + '...'}"


def _parsed_list(value: Any, key: str) -> list[dict[str, Any]]:
    """A list of objects, or its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{key} is {_shown(value)}; it must be a list, or the JSON of one ({error})") from error
    if not isinstance(value, list) or not value:
        raise DataError(f"{key} is {_shown(value)}; it must be a list of objects")
    for index, item in enumerate(cast("list[Any]", value)):
        if not isinstance(item, dict):
            raise DataError(f"{key}[{index}] is {_shown(item)}; it must be an object")
    return cast("list[dict[str, Any]]", value)


def _checked_messages(messages: Messages, key: str) -> Messages:
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise DataError(f"{key}[{index}] is {_shown(message)}; it needs a role")
        text = message.get("content")
        if not isinstance(text, str) and not (text is None and message.get("tool_calls")):
            raise DataError(
                f"{key}[{index}] has a content that is {_shown(text)}; it must be text. Join lists of parts, and leave "
                "out records with images"
            )
    return messages
