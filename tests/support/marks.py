"""Marks of parameters."""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)  # a set of parameters that only `make slow` tests
