"""The experience buffer under random SIGKILLs: writers and a trainer in processes of their own, and an account of rows.

`python -m tests.soak PLAN` runs one soak; the tests here do so, and then account for every row in the job's folder.
"""
