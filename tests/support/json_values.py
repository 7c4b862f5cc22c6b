"""Any value that JSON can hold, drawn by hypothesis."""

from hypothesis import strategies as st


def json_values(**floats):
    """``floats`` says which ones; without it they may be infinite or no number, as Python's JSON has them."""
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.floats(**floats),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        ),
        max_leaves=12,
    )


FINITE = json_values(allow_nan=False, allow_infinity=False)
