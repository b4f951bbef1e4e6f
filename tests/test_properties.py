"""Random programs: whatever the policy and the runner, the plan is right, not wasteful, and computes as eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from program_checks import COMBINATIONS, OVERLAPS, Setting, check_program, register_step_ops
from random_programs import Program, programs

LEAST = -1  # the smallest token count that the program at hand is valid for
SETTINGS = st.builds(
    Setting,
    combination=st.sampled_from(COMBINATIONS),
    engine=st.sampled_from(("off", "host")),
    check=st.sampled_from(("addresses", "full")),
    # warm up, capture, replay; another bucket in between; one token, or none
    tokens=st.sampled_from(((5, 5, 3, 5), (3, 7, 3, 7, 3, 7), (LEAST, 5, LEAST, LEAST))),  # of TOKENS
    decode=st.booleans(),
    overlaps=st.sampled_from(
        (("apart",), ("apart", *OVERLAPS), ("apart", "apart", "apart", "shifted", "the same start"))
    ),
)
SUITE = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
# Inductor takes seconds for a program: while it shrank one, the test would be ended, and nothing be shown
UNSHRUNK = (Phase.explicit, Phase.generate)


def check_compiled(program: Program, setting: Setting, piece_compiler: str) -> None:
    register_step_ops()
    tokens = [program.least if n == LEAST else n for n in setting.tokens]
    # as eager does, Inductor then rounds each result to bfloat16, and not only what leaves a kernel
    with torch.no_grad(), torch._inductor.config.patch(emulate_precision_casts=True):
        check_program(program.function, replace(setting, tokens=tokens, piece_compiler=piece_compiler))


@pytest.fixture(scope="session")
def piece_compiler(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--piece-compiler")


@SUITE
@given(program=programs(), setting=SETTINGS)
def test_a_program_means_the_same_under_every_plan(program: Program, setting: Setting, piece_compiler: str) -> None:
    check_compiled(program, setting, piece_compiler)


@settings(SUITE, max_examples=3)
@given(program=programs(), setting=SETTINGS)
def test_a_program_means_the_same_in_graphs_of_aotautograd(program: Program, setting: Setting) -> None:
    check_compiled(program, setting, "aot_eager")


@pytest.mark.inductor
@settings(SUITE, max_examples=3, phases=UNSHRUNK)
@given(program=programs(statements=5), setting=SETTINGS)
def test_a_program_means_the_same_in_kernels_of_inductor(program: Program, setting: Setting) -> None:
    check_compiled(program, setting, "inductor")


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_long_programs_mean_the_same_under_every_plan(request: pytest.FixtureRequest, piece_compiler: str) -> None:
    """As many as `--programs` says; other ones with another `--hypothesis-seed`."""
    wanted = request.config.getoption("--programs")

    @settings(max_examples=wanted, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(program=programs(statements=20), setting=SETTINGS)
    def check(program: Program, setting: Setting) -> None:
        check_compiled(program, setting, piece_compiler)

    check()
