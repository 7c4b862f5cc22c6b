"""A command line that must fail, and what its error must say."""

from functools import partial

from command import fedcache

from fedcache.errors import Exit


def must_fail(said, *words, code=Exit.USAGE):
    """``fedcache WORDS`` ends with this code and says this in its message or its hint: the error."""
    done = fedcache(*words, "--json")
    assert done.code == code, done.err + done.out
    error = done.error
    assert said in f"{error['message']}\n{error['hint']}", error
    return error


must_fail_corrupt = partial(must_fail, code=Exit.CORRUPT)
must_fail_machine = partial(must_fail, code=Exit.ENVIRONMENT)
must_fail_store = partial(must_fail, code=Exit.STORE)
must_fail_training = partial(must_fail, code=Exit.FEDERATED)
