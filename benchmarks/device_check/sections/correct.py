"""S2: 14 configurations against eager, while the memory around their graphs changes hands.

A stack of the three kinds of layers, and a draw behind it, in sizes that the plain ops are exact in. Each configuration
is called five times in each of three sizes; results, every cache, and the numbers that are drawn next are compared with
those of an eager model that is called alike. Between calls memory is allocated, written and freed around the graphs,
and a large tensor is looked at that nobody may write: a graph that reads or writes where it should not shows.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_compile import counters
from dsv4_compile.models.deepseek_v4 import AttentionStack, StepState

from ...attention_stack import stack_with, tiny_config
from ..bench import Bench
from ..models import Inputs, compiled, inductor_of, many_recompiles, renewed, tensors_of

RATIOS, DRY_RATIOS = (4, 128, 0), (4,)
SIZES, DRY_SIZES = (48, 24, 7), (24, 7)
CALLS, DRY_CALLS = 5, 4
TOLERANCE = 2e-3  # fp32; Inductor reorders sums, and a wrong address is off by far more
SENTINEL = 1 << 30


@dataclass(frozen=True, slots=True)
class Configuration:
    """Options; `compiler` is `piece_compiler` and `aux` is `aux_streams`."""

    runner: str
    region: str
    compiler: str
    aux: int
    pool: str
    static_outputs: bool
    check: str

    def options(self, bench: Bench) -> dict[str, Any]:
        """As `torch.compile` takes them; a dry run has no C++ compiler."""
        compiler = inductor_of(bench) if self.compiler == "inductor" else self.compiler
        given = {name: value for name, value in asdict(self).items() if name not in ("compiler", "aux")}
        return {**given, "piece_compiler": compiler, "aux_streams": self.aux}


# Any two values of two options meet in a row, but for mrv1 wide, whose two rows leave out aot_eager and the full check.
CONFIGURATIONS = (
    Configuration("mrv2", "narrow", "inductor", 3, "shared", True, "off"),
    Configuration("mrv2", "narrow", "eager", 0, "bucket", False, "full"),
    Configuration("mrv2", "narrow", "aot_eager", 3, "bucket", False, "addresses"),
    Configuration("mrv2", "minimal", "inductor", 3, "bucket", False, "off"),
    Configuration("mrv2", "minimal", "eager", 3, "shared", False, "addresses"),
    Configuration("mrv2", "minimal", "aot_eager", 0, "shared", True, "full"),
    Configuration("mrv2", "wide", "inductor", 0, "bucket", False, "full"),
    Configuration("mrv2", "wide", "eager", 0, "shared", False, "addresses"),
    Configuration("mrv2", "wide", "aot_eager", 3, "shared", True, "off"),
    Configuration("mrv1", "minimal", "inductor", 3, "shared", False, "off"),
    Configuration("mrv1", "minimal", "eager", 0, "bucket", True, "addresses"),
    Configuration("mrv1", "minimal", "aot_eager", 3, "bucket", True, "full"),
    Configuration("mrv1", "wide", "inductor", 3, "shared", True, "addresses"),
    Configuration("mrv1", "wide", "eager", 0, "bucket", False, "off"),
)


class Noisy(nn.Module):
    """A stack, and a draw of the size of its result."""

    def __init__(self, stack: AttentionStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        """[T, vocab] of ids and positions [T]."""
        logits: Tensor = self.stack(input_ids, positions, step)
        return logits + torch.rand_like(logits)


def run(bench: Bench) -> None:
    """One configuration after another."""
    model = Noisy(stack_with(tiny_config(bench.pick(RATIOS, DRY_RATIOS)), max(SIZES), bench.device)[0])
    sentinel = torch.full((bench.pick(SENTINEL, 1 << 16) // 4,), 7.0, device=bench.device)
    with many_recompiles():
        for configuration in CONFIGURATIONS:
            case = asdict(configuration)
            with bench.attempt(**case) as attempt:
                _Trial(bench, configuration, model, sentinel).run()
            if attempt.failed:
                bench.row("correct", "an error", expected="as eager", **case)


def fill_caches(bench: Bench) -> None:
    """Compile what the configurations will."""
    model = Noisy(stack_with(tiny_config(bench.pick(RATIOS, DRY_RATIOS)), max(SIZES), bench.device)[0])
    with many_recompiles(), torch.no_grad():
        for configuration in CONFIGURATIONS:
            if configuration.compiler == "inductor":
                options = {**configuration.options(bench), "engine": "off"}
                with bench.attempt(filling="correct", **asdict(configuration)):
                    compiled(copy.deepcopy(model), **options)(*_inputs(bench, max(SIZES)))


class _Trial:
    """One configuration and an eager model, which are called alike."""

    def __init__(self, bench: Bench, configuration: Configuration, model: Noisy, sentinel: Tensor) -> None:
        self._bench, self._configuration, self._sentinel = bench, configuration, sentinel
        self._eager, self._model = copy.deepcopy(model), copy.deepcopy(model)
        self._call = compiled(self._model, **configuration.options(bench))
        self._renews = configuration.runner == "mrv1"
        self._sizes, self._calls = bench.pick(SIZES, DRY_SIZES), bench.pick(CALLS, DRY_CALLS)
        self._inputs = {size: _inputs(bench, size) for size in self._sizes}
        if not self._renews:
            for inputs in self._inputs.values():
                for tensor in tensors_of(inputs):
                    torch._dynamo.mark_static_address(tensor)
        self._held: list[Tensor] = []
        self._worst = 0.0
        self._wrong: list[str] = []

    @torch.no_grad()
    def run(self) -> None:
        """Call, compare, and write what there is to say."""
        case = asdict(self._configuration)
        before = counters.snapshot()
        for number in range(self._calls):
            for size in self._sizes:
                self._one_call(number, size)
                self._churn(number)
        self._write_counts(before, case)
        correct = "as eager" if not self._wrong else "; ".join(self._wrong[:3])
        self._bench.row("correct", correct, expected="as eager", **case)
        self._bench.row("max_abs_err", self._worst, **case)
        intact = bool((self._sentinel == 7).all())
        self._bench.row("stable", intact and not self._wrong, expected=True, **case)
        if self._configuration.check == "addresses":
            self._move_a_weight(case)

    def _one_call(self, number: int, size: int) -> None:
        inputs = self._inputs[size]
        inputs[0].copy_((torch.arange(size) * (number + 3)) % self._eager.stack.config.vocab_size)
        given = renewed(inputs) if self._renews else inputs
        found = []
        for call in (self._call, self._eager):
            torch.manual_seed(number * 100 + size)
            found.append((call(*given).clone(), torch.rand(4, device=self._bench.device)))
        (result, drawn), (expected, drawn_by_eager) = found
        name = f"call {number + 1} of {size} tokens"
        self._note(f"{name}: result", result, expected)
        self._note(f"{name}: numbers drawn next", drawn, drawn_by_eager)
        for (buffer, ours), theirs in zip(self._model.named_buffers(), self._eager.buffers(), strict=True):
            self._note(f"{name}: {buffer}", ours, theirs)

    def _note(self, name: str, ours: Tensor, eager: Tensor) -> None:
        if not ours.is_floating_point():
            off = float((ours != eager).sum())
        else:
            off = (ours - eager).abs().max().item() / max(1.0, eager.abs().max().item())
        self._worst = max(self._worst, off) if off == off else off
        if not off <= TOLERANCE:
            self._wrong.append(f"{name} is off by {off:.2g}")

    def _churn(self, number: int) -> None:
        """Memory of all sizes changes hands; now and then torch gives back what it has cached."""
        generator = torch.Generator().manual_seed(number)
        for exponent in torch.randint(9, 20, (12,), generator=generator).tolist():
            self._held.append(torch.full((1 << exponent,), float("nan"), device=self._bench.device))
        del self._held[: len(self._held) // 2]
        if number % 2 and self._bench.device == "cuda":
            torch.cuda.empty_cache()

    def _write_counts(self, before: dict[str, int], case: dict[str, Any]) -> None:
        after = counters.snapshot()
        sizes, calls = len(self._sizes), len(self._sizes) * self._calls
        expected = {"captures": sizes, "uncaptured_calls": sizes, "replays": calls - sizes, "recaptures": 0}
        seen = {name: after[name] - before[name] for name in expected}
        self._bench.row("counts", str(seen), expected=str(expected), **case)

    def _move_a_weight(self, case: dict[str, Any]) -> None:
        """An address that moved is noticed, and captured again."""
        weight = self._model.stack.lm_head.weight
        kept = weight.data
        weight.data = kept.clone()
        kept.fill_(float("nan"))
        before = counters.recaptures
        wrong = len(self._wrong)
        for number in range(3):
            self._one_call(number, self._sizes[-1])
        self._bench.row("moved_weight", counters.recaptures - before, expected=1, **case)
        right = len(self._wrong) == wrong
        self._bench.row("moved_weight_is_right", right, expected=True, **case)


def _inputs(bench: Bench, size: int) -> Inputs:
    _, inputs = stack_with(tiny_config((0,)), size, bench.device)
    return inputs
