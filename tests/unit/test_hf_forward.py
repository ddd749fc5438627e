"""Chunked logprobs and entropies: equal to the dense ones, forward and backward, and the full logits never exist."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.hf import forward
from engines.hf.forward import Head, tempered_logits, token_logprobs

VOCABULARY, WIDTH = 13, 6


def problem(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias (float64, with gradient) and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)


def dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> tuple[Any, Any]:
    """The definition."""
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    log_probs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return log_probs.gather(1, targets[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("num_tokens", [1, 5, 33, 100])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_dense_forward_and_backward(
    num_tokens: int, temperature: float, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "CHUNK_BYTES", 4 * VOCABULARY * 7)
    hidden, weight, bias, targets = problem(num_tokens)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    head = Head(weight, bias if with_bias else None)
    ours = token_logprobs(hidden, head, targets, temperature, dtype=torch.float64, entropy=True)
    theirs = dense(hidden, weight, head.bias, targets, temperature)
    mixed = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, other)
        gradients = torch.autograd.grad((mine * mixed).sum(), leaves, retain_graph=True)
        expected = torch.autograd.grad((other * mixed).sum(), leaves, retain_graph=True)
        torch.testing.assert_close(gradients, expected)


def test_only_the_label_of_a_token_moves_its_logprob() -> None:
    hidden, weight, bias, targets = problem(10)
    before, _ = token_logprobs(hidden, Head(weight, bias), targets, dtype=torch.float64)
    targets[3] = (targets[3] + 1) % VOCABULARY
    after, _ = token_logprobs(hidden, Head(weight, bias), targets, dtype=torch.float64)
    assert ((before != after).nonzero().flatten() == 3).all()


def test_no_tokens_give_nothing_and_zero_gradients() -> None:
    hidden, weight, _, targets = problem(0)
    logprobs, _ = token_logprobs(hidden, Head(weight), targets)
    gradient = torch.autograd.grad(logprobs.sum(), weight)[0]
    assert logprobs.shape == (0,)
    assert not gradient.any()


def test_bfloat16_products_keep_a_float32_softmax() -> None:
    """The gap comes from rounding logits to 8 bits, not from the softmax: it stays below that of one logit."""
    hidden, weight, _, targets = problem(200)
    single = hidden.detach().float(), Head(weight.detach().float()), targets
    exact, _ = token_logprobs(*single)
    rounded, _ = token_logprobs(*single, dtype=torch.bfloat16)
    largest = tempered_logits(single[0], single[1], 1.0, torch.float32).abs().max()
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 2 * largest * 2**-8


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, Tensor):
                self.numel = max(self.numel, item.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_full_logits_never_exist(entropy: bool) -> None:
    tokens, vocabulary = 600, 100_000
    hidden = torch.randn(tokens, 4, requires_grad=True)
    head = Head(torch.randn(vocabulary, 4, requires_grad=True))
    with LargestTensor() as largest:
        outputs = token_logprobs(hidden, head, torch.arange(tokens), entropy=entropy)
        torch.autograd.backward([output.sum() for output in outputs if output is not None])
    assert largest.numel <= forward.CHUNK_BYTES / 4
    assert largest.numel < tokens * vocabulary / 10
