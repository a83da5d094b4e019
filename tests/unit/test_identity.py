"""Object keys follow from what the caller named, and from nothing else."""

import re

from hypothesis import given
from hypothesis import strategies as st

from muniment.core.identity import LOCAL_ACCOUNT, object_key

named = st.tuples(
    st.sampled_from(["memory", "stream", "step"]), st.text(max_size=4), st.text(max_size=4), st.integers(0, 3)
)


def test_keys_never_change() -> None:
    """Computed apart with sha256sum and base32: printf '[1,"local","op",0]' | sha256sum."""
    assert object_key("memory", LOCAL_ACCOUNT, "op") == "memory:w56hbuhyftf2szym224hdgmt5f"
    assert object_key("step", LOCAL_ACCOUNT, "op") == "step:w56hbuhyftf2szym224hdgmt5f"


@given(named, named)
def test_equal_keys_mean_equal_names(one: tuple[str, str, str, int], two: tuple[str, str, str, int]) -> None:
    keys = [object_key(kind, *rest) for kind, *rest in (one, two)]  # type: ignore[arg-type]
    assert (keys[0] == keys[1]) is (one == two)


@given(st.text(max_size=20))
def test_a_key_has_one_form(operation_id: str) -> None:
    assert re.fullmatch(r"stream:[a-z2-7]{26}", object_key("stream", LOCAL_ACCOUNT, operation_id))


def test_the_borders_between_the_names_count() -> None:
    assert object_key("memory", "a", "bc") != object_key("memory", "ab", "c")
    assert object_key("memory", "a", "1") != object_key("memory", "a", "", 1)
