"""Looking at the rows of an experience buffer: `scan.py` streams them, `report.py` counts, `export.py` copies.

Nothing here writes to a job's folder. `names.py` says which columns there are, `where.py` which rows are wanted.
"""
