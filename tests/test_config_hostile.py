"""fedcache.toml of any bytes: an error in words, or a configuration that says the same when it is written again."""

import tomllib

import numpy as np
import pytest
from command import fedcache
from draws import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from refusal import refused
from safetensors.numpy import save_file

from fedcache.config import SECTIONS, read_file, resolve, to_table
from fedcache.errors import Exit, FedcacheError

WORDS = [name for kind in SECTIONS.values() for name in kind.__dataclass_fields__]
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def outcome(path):
    """The code of the refusal, None for a file that is taken."""
    code = None
    try:
        for name, section in read_file(path).items():
            made = resolve(SECTIONS[name], section, {})
            again = resolve(SECTIONS[name], to_table(made), {})
            assert repr(again) == repr(made)  # repr: nan is not equal to itself
    except FedcacheError as error:
        code = error.code
    return code


@examples(150, 300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.binary(max_size=200) | st.text(max_size=100).map(lambda s: s.encode("utf-8", "replace"))
)
def test_a_configuration_of_any_bytes(tmp_path, raw):
    (tmp_path / "f.toml").write_bytes(raw)
    assert outcome(tmp_path / "f.toml") in (None, Exit.USAGE)


@pytest.mark.slow
@examples(150, 300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    section=st.sampled_from([*SECTIONS, "trian"]), key=st.sampled_from([*WORDS, "lr"]), value=VALUES
)
def test_a_configuration_with_any_value(tmp_path, section, key, value):
    import tomli_w

    try:
        text = tomli_w.dumps({section: {key: value}})
        tomllib.loads(text)
    except (ValueError, UnicodeError):
        return  # no TOML has it
    (tmp_path / "f.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert outcome(tmp_path / "f.toml") in (None, Exit.USAGE)


NESTED = [
    "[train]\nset = " + "[" * 20_000 + "]" * 20_000,
    "[" + ".".join(["train"] + ["a"] * 5_000) + "]\nb = 1",
    "[train]\nset = " + "[" * 60 + "]" * 60,
]


@pytest.mark.parametrize("text", NESTED, ids=["arrays", "header", "arrays of 60"])
def test_a_configuration_nested_thousands_deep_is_refused_in_words(tmp_path, text):
    (tmp_path / "f.toml").write_text(text)
    refused(lambda: read_file(tmp_path / "f.toml"), "50 deep")


def test_deep_json_of_an_embedding_file_is_refused_in_words(tmp_path):
    deep = '{"classes": ' + "[" * 100_000 + "]" * 100_000 + "}"
    save_file(
        {"features/a": np.ones((4, 2), np.float32)},
        tmp_path / "e.safetensors",
        metadata={"fedcache": deep},
    )
    assert fedcache(f"ingest {tmp_path}/e.safetensors --name deep").code in (2, 5)
