"""The cuda engine keeps the rules of capture: the examples that the host engine keeps, on a GPU."""

import pytest
import torch
from engine_examples import EXAMPLES
from engine_lanes import EXAMPLES as LANES
from engine_surroundings import EXAMPLES as SURROUNDINGS

from dsv4_compile.runtime.engine import engine_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


RULES = EXAMPLES | SURROUNDINGS | LANES


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    RULES[name](engine_for("cuda", torch.device("cuda", torch.cuda.current_device())))
