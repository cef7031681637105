"""What only `make slow` tests, and how often `make test` tests a property."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

slow = partial(pytest.param, marks=pytest.mark.slow)  # a set of parameters that only `make slow` tests

_TIMES = settings.default.max_examples // 100  # 1; 4 in `make slow`, by the profile of `tests/conftest.py`
_AS_FOUND: dict[str, Any] = {
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


def examples(count: int, *, shrink: bool = True) -> Callable[[Any], Any]:
    """So many random examples of a property in `make test`, and four times as many in `make slow`.

    Without `shrink`, an example that fails is shown as it was found: to look for a smaller one takes hundreds of examples,
    too many where each is a simulation.
    """

    def marked(test: Any) -> Any:
        return pytest.mark.thorough(settings(max_examples=count * _TIMES, **({} if shrink else _AS_FOUND))(test))

    return marked
