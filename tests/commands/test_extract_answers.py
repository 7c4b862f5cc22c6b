"""What ``extract`` answers a person, of extractions of every kind."""

import pytest
from failing_command import must_fail


@pytest.mark.parametrize("words", ["--clients 3", "--option a=1", "--partition-seed 1", "--out x"])
def test_options_of_a_scheme_without_one_are_refused(words):
    must_fail("--partition", f"extract --dataset digits --backbones glyph-clip {words}")
