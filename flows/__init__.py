"""Decisions: what a user starts, schedules or edits. Each flow is a module of its own: `flows.train.train`, ...

Importing this package is free; the flows' modules import Prefect, and none of them imports torch or mlflow.
"""
