"""What opening a dataset must refuse."""

from functools import partial

from opened import open_dataset
from refusal import refused

from fedcache.errors import Exit


def no_dataset(spec, *words, code=Exit.USAGE, **options):
    """Opening this dataset is refused with these words; the error."""
    return refused(lambda: open_dataset(spec, **options), *words, code=code)


damaged_dataset = partial(no_dataset, code=Exit.CORRUPT)
missing_dataset = partial(no_dataset, code=Exit.ENVIRONMENT)
