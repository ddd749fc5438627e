"""A second opinion: TRL's own trainers, run on the same inputs as our algorithms, must find the same numbers.

Nothing of theirs is copied here: the installed code computes the loss and autograd its gradient. Parameters are mapped
in the tests, by name. Where the two differ on purpose, a test derives what each must give and says which is why.

verl is not compared here: it cannot be installed beside the transformers that this project needs (verl 0.9.1 asks for
less than 5.11, and for ray). The golden vectors of tests/golden come from it.
"""
