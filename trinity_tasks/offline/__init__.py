"""Data that exists before the job: files of records or another program's experiences become shards of a buffer.

`importer.py` is the door. `files.py` finds the files, `sources.py` reads records from them, `formats.py` makes rows of
records, and `trinity_db.py` takes the rows of Trinity-RFT's own databases.
"""
