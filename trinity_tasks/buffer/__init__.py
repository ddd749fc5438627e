"""The experience buffer: writers append shards, a trainer takes each row exactly once, a ledger says which step did.

`writer.py` is the door for rows, `source.py` is what a trainer takes batches from. They share only the objects that
`layout.py` names and `shards.py` encodes.
"""

from trinity_tasks.buffer.reader import ExperienceReader
from trinity_tasks.buffer.writer import ExperienceWriter

__all__ = ["ExperienceReader", "ExperienceWriter"]
