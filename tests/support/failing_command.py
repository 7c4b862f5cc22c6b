"""A command line that must fail, and what its error must say."""

from command import fedcache

from fedcache.errors import Exit


def must_fail(said, *words, code=Exit.USAGE):
    """``fedcache WORDS`` ends with this code and says this in its message or its hint: the error."""
    done = fedcache(*words, "--json")
    assert done.code == code, done.err + done.out
    error = done.envelope["error"]
    assert said in f"{error['message']}\n{error['hint']}", error
    return error
