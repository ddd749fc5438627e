"""Golden vectors of the reference system, and the loader that proves our algorithms with them.

`python -m tests.golden DIR` compares three things for each case: our function, an independent derivation from the
paper, and the file. Ours must be the derivation, always. Ours must be the file's number, unless a listed difference
applies to the inputs of the case; then that number must still be the one of the reference's own formula. The list:

1 gradients there are sums over micro-batch means; 2 DPO sums margins before the sigmoid; 3 SAPO detaches its gate; 4
rows without tokens count, and 1e-8 is added to denominators (taken out exactly: `batches`); 5 GAE and REINFORCE++ run
through masked tokens; 6 a group of one keeps its reward; 7 crashes; 8 declared defaults are not applied; 9 the parts of
mix and CHORD are not normalised; 10 step-wise GRPO takes the last listed step; 11 the rank penalty is left out of the
numerator; 12 metrics are reduced by their names; 13 the gradient of corrected_k3, where ours is the same by choice.
"""
