"""What a call must refuse, and what the refusal must say."""

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
        assert word in str(caught.value), str(caught.value)
    return caught.value


def bad_image(read, of, said=""):
    """``read(of)`` raises BadImage, whose words these are."""
    with pytest.raises(BadImage) as caught:
        read(of)
    assert said in str(caught.value)
