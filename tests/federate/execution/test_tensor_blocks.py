"""Tensors that stay lie side by side: equal copies, no overlap, and blocks that go with the last of them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcache.federate.execution.gram_states import ClientStates
from fedcache.federate.execution.tensor_blocks import (
    ALIGNED,
    TensorBlocks,
)

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8, torch.float16)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_copies_are_equal_contiguous_and_apart(wanted):
    blocks, given_, kept = TensorBlocks(), [], []
    for number, (dtype, shape, turned) in enumerate(wanted):
        t = (torch.arange(int(torch.Size(shape).numel())).reshape(shape) % 2 + number).to(dtype)
        t = t.mT if turned and t.dim() > 1 else t
        given_.append(t)
        kept.append(blocks.copy(t))
    for t, copy in zip(given_, kept, strict=True):
        assert copy.dtype == t.dtype
        assert copy.shape == t.shape
        assert copy.is_contiguous()
        assert torch.equal(copy, t)  # so no later one was written over it
        assert not copy.nbytes or copy.data_ptr() % ALIGNED == 0
    for t, copy in zip(given_, kept, strict=True):
        before = t.clone()
        copy.fill_(0)
        assert torch.equal(t, before)


def test_a_client_is_written_in_its_place_round_after_round():
    states = ClientStates()
    for client in range(5):
        states.write(client, {"W": torch.full((10,), float(client)), "rows/q": torch.zeros(3, 2)})
    where = {c: states[c]["W"].data_ptr() for c in states}
    given_ = {"W": torch.full((10,), 7.0), "rows/q": torch.ones(3, 2)}
    states.write(2, given_)
    assert {c: states[c]["W"].data_ptr() for c in states} == where
    given_["W"].zero_()
    assert [float(states[c]["W"][0]) for c in states] == [0, 1, 7, 3, 4]


def test_a_client_whose_tensors_change_their_shape_leaves_the_block():
    """A block would keep its old place for as long as its neighbours, and a new one every round would fill memory."""
    states = ClientStates()
    states.write(0, {"q": torch.zeros(4)})
    states.write(1, {"q": torch.zeros(4)})
    for rows in (5, 6):
        states.write(0, {"q": torch.full((rows,), 2.0)})
        assert states[0]["q"].untyped_storage().nbytes() == 4 * rows
    assert states[0]["q"].tolist() == [2.0] * 6
    assert states[1]["q"].tolist() == [0.0] * 4
