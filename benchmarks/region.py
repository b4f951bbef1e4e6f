"""What each way to place the eager holes leaves to launch by hand, and what a step takes, on attention layers.

A launch is an op of an eager region, called on every step; on a GPU it is one kernel or more. Counts come from the
plans, the same on any machine, and the measured steps check them against the counters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.errors import HazardError
from dsv4_compile.models.deepseek_v4 import StepState

from .attention_stack import mark_request_dims, pattern, plan_of, stack_and_inputs
from .sections import Section, Setting, Table
from .settled import launches_of_a_replay, measure_settled

POLICIES = tuple((runner, region) for runner in ("mrv1", "mrv2") for region in ("wide", "minimal", "narrow"))
KINDS = {"SWA": 0, "C4A": 4, "C128A": 128}
TOKENS = 32
REFUSED = "-"
INTRO = """
Ops launched by hand in a step, for one layer of each kind and for a stack of {layers} layers as in the Pro model (C128A
twice, then C4A and C128A in turn); eager launches {all_ops} there. Under mrv1 a narrow region would freeze what the
step state decides, so it is refused when compiling (-).
"""
SAVED = """
Under mrv1, {layers} layers leave {wide} launches a step with wide and {minimal} with minimal: {fewer:.0%} fewer. What
minimal saves are all ops that need not be eager, the projection of the indexer's queries among them; what it leaves
beyond the {narrow} split ops reads the step state, which mrv1 makes anew for every step.
"""
STEPS = """
A step of {tokens} tokens through {layers} layers, with new step state every time under mrv1 and in place under mrv2.
The ops here are plain torch and their kernels dominate, and the host engine replays kernels one by one, so these ratios
say little about a GPU.
"""
Inputs = tuple[Tensor, Tensor, StepState]


def launches(ratios: tuple[int, ...], runner: str, region: str) -> int | None:
    """Ops in eager regions; None if the policy is refused."""
    try:
        plan = plan_of(ratios, TOKENS, runner, region)
    except HazardError:
        return None
    return sum(len(unit.ops) for unit in plan.regions)


def launch_table(layers: int) -> Table:
    """Launches of each policy by layer kind, and for a whole stack."""
    rows = []
    for policy in POLICIES:
        counts = [launches((ratio,), *policy) for ratio in KINDS.values()]
        # what one layer is refused, a stack of them is too, after a long trace
        counts.append(None if None in counts else launches(pattern(layers), *policy))
        rows.append((*policy, *(REFUSED if count is None else str(count) for count in counts)))
    return Table(("runner", "region", *(f"{kind} layer" for kind in KINDS), f"{layers} layers"), tuple(rows))


def one_step(call: Callable[..., Any], inputs: Inputs, *, renews: bool) -> Callable[[], object]:
    """A call with new inputs, as a server makes it; with new step state too if the runner renews it."""
    ids, positions, step = inputs
    fields = [field.name for field in dataclasses.fields(step)]
    if not renews:
        for field in fields:
            torch._dynamo.mark_static_address(getattr(step, field))

    def run() -> object:
        state = step
        if renews:
            state = mark_request_dims(StepState(**{field: getattr(step, field).clone() for field in fields}))
        return call(ids.clone(), positions.clone(), state)

    return run


def steps(layers: int, device: str) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """What is timed, and the launches by hand in a captured step of each; every one has a stack of its own."""
    stack, inputs = stack_and_inputs(layers, TOKENS, device)
    rows: dict[str, Callable[[], object]] = {"eager": one_step(stack, inputs, renews=True)}
    counted: dict[str, int] = {}
    for runner, region in POLICIES:
        if launches(pattern(1), runner, region) is None:
            continue
        name = f"{runner} {region}"
        stack, inputs = stack_and_inputs(layers, TOKENS, device)
        options: dict[str, Any] = {"runner": runner, "region": region}
        compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, options=options)
        rows[name] = one_step(compiled, inputs, renews=runner == "mrv1")
        counted[name] = launches_of_a_replay(rows[name])
    return rows, counted


def run(setting: Setting) -> Section:
    """Count on the whole stack, time on a smaller one."""
    deep, shallow, seconds = (3, 3, 0.05) if setting.quick else (61, 8, 2.0)
    if setting.device != "cpu":
        deep = 3  # plans are the same on any machine, and those of a deep stack keep a GPU waiting
    rows, counted = steps(shallow, setting.device)
    medians = measure_settled(rows, seconds, setting.device)
    times = Table(
        ("", "ms a step", "of eager", "launches by hand"),
        tuple(_time_row(name, medians, counted) for name in medians),
    )
    launched, saved = launch_table(deep), saving(deep)
    intro, timing = INTRO.format(layers=deep, all_ops=all_ops(deep)), STEPS.format(tokens=TOKENS, layers=shallow)
    return Section(title="Eager launches by region", parts=(intro, launched, saved, timing, times))


def saving(layers: int) -> str:
    """What minimal leaves beside wide, in a sentence."""
    policies = (("mrv1", "wide"), ("mrv1", "minimal"), ("mrv2", "narrow"))
    wide, minimal, narrow = (launches(pattern(layers), *policy) or 0 for policy in policies)
    return SAVED.format(layers=layers, wide=wide, minimal=minimal, narrow=narrow, fewer=1 - minimal / wide)


def all_ops(layers: int) -> int:
    """Ops of a step, captured or not."""
    return sum(len(unit.ops) for unit in plan_of(pattern(layers), TOKENS, "mrv2", "narrow").units)


def _time_row(name: str, medians: dict[str, float], counted: dict[str, int]) -> tuple[str, ...]:
    by_hand = str(counted[name]) if name in counted else "all"
    return name, f"{medians[name] * 1e3:.2f}", f"{medians[name] / medians['eager']:.2f}", by_hand
