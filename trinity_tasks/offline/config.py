"""`OfflineConfig`: which data is imported, and how a record becomes a row. Key names are those of Trinity-RFT.

Owns: the section and its own rules. Does not own: whether an algorithm can train on such rows (`trinity_tasks.config`).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from engines.config import Frozen, Resume

IMPORT_WRITER: Final = "import"
"""Name under which imported experiences are written."""

Format = Literal["auto", "jsonl", "parquet", "datasets", "trinity"]
SchemaType = Literal["sft", "cpt", "dpo"]
TooLong = Literal["refuse", "drop", "truncate"]


class OfflineConfig(Frozen):
    """Data that exists before the job, and how its records become experiences.

    Example:
        >>> OfflineConfig(path="s3://data/chats.jsonl", schema_type="sft").messages_key
        'messages'
    """

    path: Annotated[str, Resume.SAFE] = Field(min_length=1)
    """File or folder, local or on any store. It may move between two runs; its content may not change."""
    format: Annotated[Format, Resume.FORK] = "auto"
    """datasets: a folder of that library. trinity: an experience database of Trinity-RFT. auto: by name and content."""
    schema_type: Annotated[SchemaType, Resume.FORK] = "sft"
    """sft: conversations or pairs of prompt and response. cpt: plain text. dpo: a preferred and a refused response."""
    split: Annotated[str, Resume.FORK] = Field(default="train", min_length=1)
    """Split of a folder that has several."""
    table: Annotated[str | None, Resume.FORK] = None
    """Table of an experience database. None: the only one that it has."""
    prompt_type: Annotated[Literal["messages", "plaintext"], Resume.FORK] = "messages"
    """sft and dpo: whether a record holds lists of messages, or texts."""
    messages_key: Annotated[str, Resume.FORK] = "messages"
    """messages: the conversation; for dpo, the one that both responses continue."""
    tools_key: Annotated[str, Resume.FORK] = "tools"
    """messages: descriptions of functions for the chat template; a record need not have them."""
    multi_turn: Annotated[bool, Resume.FORK] = False
    """sft on messages: train every turn of the assistant, not only the last."""
    prompt_key: Annotated[str, Resume.FORK] = "prompt"
    """plaintext: the user's text; for cpt, the whole text."""
    response_key: Annotated[str, Resume.FORK] = "response"
    """sft on plaintext: the assistant's text."""
    system_prompt_key: Annotated[str | None, Resume.FORK] = None
    """plaintext: the system's text in each record. Wins over system_prompt."""
    system_prompt: Annotated[str | None, Resume.FORK] = None
    """plaintext: one system text for all records."""
    chosen_key: Annotated[str, Resume.FORK] = "chosen"
    """dpo: the preferred response, a text or a list of messages."""
    rejected_key: Annotated[str, Resume.FORK] = "rejected"
    """dpo: the refused response, a text or a list of messages."""
    rows_per_shard: Annotated[int, Resume.FORK] = Field(default=256, ge=1)
    """Records that become one shard; so many rows are held in memory.

    A shard is read whole for any of its rows, so a shuffled batch of 64 rows reads up to 64 shards: smaller ones make
    that cheaper, larger ones are fewer objects to list and to write.
    """
    too_long: Annotated[TooLong, Resume.FORK] = "refuse"
    """A row beyond the model's limits: refuse the data, drop the row, or truncate its response."""

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.multi_turn and (self.schema_type, self.prompt_type) != ("sft", "messages"):
            raise ValueError(
                "multi_turn trains every assistant's turn: it needs schema_type: sft, prompt_type: messages"
            )
        if self.format == "trinity" and self.too_long == "truncate":
            raise ValueError(
                "too_long: truncate would change experiences whose logprobs and rewards are of the whole response; use "
                "refuse or drop with format: trinity"
            )
        return self
