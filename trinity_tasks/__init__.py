"""Everything that must survive a crash. Experiences, checkpoints, published weights, metrics, the `Trainer`.

Importing this package imports neither torch nor mlflow.
"""
