"""The host engine keeps every rule of capture, and a few that only it has."""

import pytest
from engine_examples import EXAMPLES
from engine_surroundings import EXAMPLES as SURROUNDINGS

from dsv4_compile.runtime.host import HostEngine

RULES = EXAMPLES | SURROUNDINGS


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    RULES[name](HostEngine())
