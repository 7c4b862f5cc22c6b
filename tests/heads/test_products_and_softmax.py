"""Products by oneDNN and softmax along the quick axis: the same numbers as torch's plain operations."""

import pytest
import torch
from command import python
from float64 import normal
from hypothesis import given
from hypothesis import strategies as st

from fedcache.heads import linear
from fedcache.heads.linear import affine
from fedcache.heads.losses import log_softmax, softmax
from fedcache.heads.projection import unit


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def test_a_product_is_that_of_torch_in_every_order_of_memory():
    exact = drawn(60, 300, dtype=torch.float64) @ drawn(80, 300, dtype=torch.float64).mT
    x = torch.zeros(60, 900)[:, 200:500]
    w = torch.zeros(700, 80)[100:400].mT
    x[:] = drawn(60, 300, dtype=torch.float64)
    w[:] = drawn(80, 300, dtype=torch.float64)
    gaps = torch.zeros(80, 301)[:, :300]
    gaps[:] = w
    assert linear.by_onednn(x, w) == linear.onednn_works()
    for b in (w, gaps, w.contiguous()):
        torch.testing.assert_close(linear.times_transposed(x, b).double(), exact, rtol=0, atol=1e-4)
    expanded = linear.times_transposed(x[:1].expand(60, -1), w).double()
    torch.testing.assert_close(expanded, exact[:1].expand(60, -1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one client", "three clients"])
@pytest.mark.parametrize("rows", [1, 300])
def test_a_map_and_its_gradients_are_those_of_torch(lead, rows):
    width = 700
    classes = 64  # at 40 rows, 1.8 million multiplications: enough for oneDNN
    x = drawn(*lead, rows, width)
    W = drawn(*lead, classes, width)
    b = drawn(*lead, classes)
    made = [t.clone().requires_grad_() for t in (x, W, b)]
    plain = [t.double().requires_grad_() for t in (x, W, b)]
    du = drawn(*lead, rows, classes)
    u = affine(*made)
    exact = plain[0] @ plain[1].mT + plain[2].unsqueeze(-2)
    torch.testing.assert_close(u.double(), exact, rtol=0, atol=1e-3)
    got = torch.autograd.grad(u, made, du)
    want = torch.autograd.grad(exact, plain, du.double())
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_processor_without_avx512_uses_torchs_own_product():
    code = (
        "import torch; from fedcache.heads import linear; from fedcache.heads.ridge import gram, gram_single\n"
        "a, b = torch.ones(64, 256), torch.ones(128, 256)\n"
        "assert not linear.onednn_works() and not linear.by_onednn(a, b)\n"
        "assert torch.equal(linear.times_transposed(a, b), torch.full((64, 128), 256.0))\n"
        "assert torch.equal(gram_single(a), gram(a.double()))"
    )
    python(code, ATEN_CPU_CAPABILITY="avx2")


@pytest.mark.slow
@given(
    lead=st.lists(st.integers(1, 4), max_size=2),
    rows=st.sampled_from([1, 5, 130, 600]),
    classes=st.integers(1, 20),
    order=st.randoms(use_true_random=False),
)
def test_softmax_is_torchs_for_every_order_of_memory(lead, rows, classes, order):
    shape = (*lead, rows, classes)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    lies = drawn(*(shape[a] for a in axes), dtype=torch.float64)
    u = lies.permute([axes.index(i) for i in range(len(shape))]).requires_grad_()
    assert u.shape == shape
    for ours, torchs in ((softmax, torch.softmax), (log_softmax, torch.log_softmax)):
        made = ours(u)
        want = torchs(u, -1)
        torch.testing.assert_close(made, want, rtol=1e-13, atol=1e-13)
        du = drawn(*shape, dtype=torch.float64)
        got, exact = (torch.autograd.grad(f, u, du)[0] for f in (made, want))
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_rows_at_length_one_have_the_gradient_of_normalize(lead):
    x = torch.relu(normal(*lead, 5, 7, seed=1))
    x[..., 2, :] = 0.0
    g = normal(*x.shape, seed=2)
    x.requires_grad_()
    assert torch.equal(unit(x), torch.nn.functional.normalize(x, dim=-1))
    (ours,) = torch.autograd.grad(unit(x), x, g)
    (theirs,) = torch.autograd.grad(torch.nn.functional.normalize(x, dim=-1), x, g)
    assert torch.allclose(ours, theirs, rtol=1e-14)
