"""Random programs: whatever the policy and the runner, the plan is right, not wasteful, and computes what eager does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_checks import COMBINATIONS, Setting, check_program, register_step_ops
from random_programs import Program, programs

LEAST = -1  # the smallest token count that the program at hand is valid for
SETTINGS = st.builds(
    Setting,
    combination=st.sampled_from(COMBINATIONS),
    engine=st.sampled_from(("off", "host")),
    check=st.sampled_from(("addresses", "full")),
    # warm up, capture, replay; another bucket in between; one token, or none
    tokens=st.sampled_from(((5, 5, 3, 5), (3, 7, 3, 7, 3, 7), (LEAST, 5, LEAST, LEAST))),
)
SUITE = settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
LONG = settings(max_examples=2000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])


def at_least(least: int, setting: Setting) -> Setting:
    return replace(setting, tokens=[least if n == LEAST else n for n in setting.tokens])


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("chosen with --long")


@pytest.mark.timeout(900)  # it takes 90 seconds where nothing else runs
@SUITE
@given(program=programs(), setting=SETTINGS)
def test_a_program_means_the_same_under_every_plan(program: Program, setting: Setting) -> None:
    register_step_ops()
    with torch.no_grad():
        check_program(program.function, at_least(program.least, setting))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("long_run")
@LONG
@given(program=programs(statements=20), setting=SETTINGS)
def test_a_long_program_means_the_same_under_every_plan(program: Program, setting: Setting) -> None:
    register_step_ops()
    with torch.no_grad():
        check_program(program.function, at_least(program.least, setting))
