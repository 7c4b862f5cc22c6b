"""The Python API gives the same results in any torch state of the caller, and leaves that state as it was."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from pictures import folder

import fedcache as fc


def set_for(setter, value, usual):
    """A setting of torch that is no context of its own, until the end of the block."""
    stack = ExitStack()
    stack.callback(setter, usual)
    setter(value)
    return stack


STATES = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "another default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another default dtype": lambda: set_for(torch.set_default_dtype, torch.float64, torch.float32),
    "half the default dtype": lambda: set_for(
        torch.set_default_dtype, torch.float16, torch.float32
    ),
    "faster matrix products": lambda: set_for(
        torch.set_float32_matmul_precision, "medium", "highest"
    ),
}


def state_now():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )


def from_images_to_scores(images, name):
    """Extract, partition, train and predict; another name is another store, so nothing is read again."""
    store = fc.extract(f"{name}=folder:{images}", backbones=["random-projection"], workers=0)
    parts = fc.partition(store, "iid", clients=3)
    model = fc.train("fedavg", store, parts, rounds=2).model()
    X, _ = store.Xy(split="test")
    return model.probabilities(X), model.predict([str(images)])


def fitted_scores():
    X = np.random.default_rng(3).normal(size=(60, 5))
    y = np.where(X[:, 0] > 0, "zebra", "ant")
    return fc.FedClassifier("fedavg", rounds=2, clients=3).fit(X, y).predict_proba(X)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_the_callers_torch_state_changes_no_result(state, tmp_path):
    images = folder(tmp_path / "images", train=6, test=2)
    usual, names = from_images_to_scores(images, "usual")
    classifier = fitted_scores()
    with ExitStack() as stack:
        stack.enter_context(STATES[state]())
        before = state_now()
        other, other_names = from_images_to_scores(images, "other")
        assert np.array_equal(fitted_scores(), classifier)
        assert state_now() == before
    assert np.array_equal(other, usual)
    assert other_names == names
