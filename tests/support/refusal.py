"""What a call must refuse, and what the refusal must say."""

from functools import partial

import pytest

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.image_files import BadImage


def refused(call, *words, code=Exit.USAGE):
    """``call`` raises a FedcacheError of this code with a hint, and message and hint hold all the words; the error."""
    with pytest.raises(FedcacheError) as caught:
        call()
    assert caught.value.code == code, caught.value.code
    assert caught.value.hint
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)
    return caught.value


corruption = partial(refused, code=Exit.CORRUPT)
machine_error = partial(refused, code=Exit.ENVIRONMENT)
store_error = partial(refused, code=Exit.STORE)
training_error = partial(refused, code=Exit.FEDERATED)
stopped = partial(refused, code=Exit.INTERRUPTED)


def bad_image(read, of, said=""):
    """``read(of)`` raises BadImage, whose words these are."""
    with pytest.raises(BadImage) as caught:
        read(of)
    assert said in str(caught.value)
