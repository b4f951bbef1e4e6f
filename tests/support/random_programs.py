"""Random straight-line programs as Python source, for the property tests.

A program is built one statement at a time. Each candidate statement is run eagerly at two token counts while the
program grows, and is dropped if eager refuses it (a shape that does not fit, an operand that overlaps its target): so
every program is valid, and no shape rules are repeated here. Random draws are left out.

    def program(x, y, w, cache, pick, step, k, scale):
        v0 = x @ w
        s1 = v0.size()
        v2 = torch.empty(s1)
        toy.attn(v0, v2)
        v2[:, 1:3] = scale
        return [v2, v0[1:]]
"""

from __future__ import annotations

import contextlib
import linecache
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from toy_ops import LOG, StepContext

WIDTH = 4
TOKENS = (5, 3, 7)  # token counts that every program is valid for
LEAST = (1, 1, 1, 0)  # one of these is the smallest token count that a program must be valid for
ROWS = 16  # of the cache
PARAMETERS = ("x", "y", "w", "cache", "pick", "step", "k", "scale")
_MODES = {"autocast": 'with torch.autocast("cpu", dtype=torch.bfloat16):', "no_grad": "with torch.no_grad():"}

# {a}, {b}: any float tensors with data. {t}: a tensor that is written. {s}: a size read earlier. {i}: an int read
# earlier. {u}, {v}: new names.
MAKES = (
    "{v} = {a} + {b}",
    "{v} = {a} * 0.5 - {b}",
    "{v} = {a} * scale",
    "{v} = {a} - k",
    "{v} = {a} @ w",
    "{v} = torch.cat([{a}, {b}], -1)",
    "{v} = torch.cat([{a}, {b}, {a}])",
    "{v} = torch.stack([{a}, {b}])",
    "{v} = {a}.sum(-1)",
    "{v} = {a}.clone()",
    "{v} = {a}.float()",
    "{v} = {a}.contiguous()",
    "{v} = {a}.reshape(-1)",
    "{v} = torch.zeros_like({a})",
    "{v} = {a}.new_zeros({a}.size())",
    "{v} = {a}[pick]",
    "{v} = torch.where({a} > 0, {a}, {b})",
    "{v} = {a} * {a}.shape[0]",
    "{v} = {a} * {i}",
)
VIEWS = (
    "{v} = {a}[:, 1:3]",
    "{v} = {a}[1:]",
    "{v} = {a}[..., 0]",
    "{v} = {a}.select(-1, 1)",
    "{v} = {a}.t()",
    "{v} = {a}.transpose(0, -1)",
    "{v} = {a}.unsqueeze(1)",
    "{v} = {a}.expand(2, *{a}.shape)",
    "{v} = {a}.view(-1)",
    "{v} = {a}.detach()",
    "{v} = {a}.view(*{a}.size()[:-1], 2, -1)",
    "{u}, {v} = {a}.chunk(2, -1)",
    "{u}, {v} = {a}.split([1, 3], -1)",
    "{u}, _, {v}, _ = {a}.unbind(-1)",
    "{v} = {a}.as_strided(({a}.shape[0], 2), (4, 1), 1)",
    "{v} = {a}.view({s})",
    "{v} = {a}.reshape({s})",
    "{v} = {a}.view(*{s}[:-1], 2, -1)",
)
SIZES = ("{v} = {a}.size()", "{v} = {a}.shape[0] * 2 + 1", "{v} = {a}.numel()", "{v} = {a}.size(-1)")
ALLOCATIONS = (
    "{v} = torch.empty_like({a})",
    "{v} = {a}.new_empty({a}.size())",
    "{v} = torch.empty({a}.shape[0], 4)",
    "{v} = torch.empty({s})",
)
FILLS = (
    "{t}.copy_({a})",
    "{t}.zero_()",
    "{t}.fill_(scale)",
    "torch.add({a}, {b}, out={t})",
    "torch.mul({a}, 2, out={t})",
    "torch.mm({a}, w, out={t})",
    "toy.attn.default({a}, {t})",
)
WRITES = (
    "{t}.add_({a})",
    "{t}.mul_(2)",
    "{v} = {t}.add_(k)",
    "{v} = {t}.mul_({a})",
    "{t}.masked_fill_({a} > 0, 0.25)",
    "{t}[:, 1:3] = {a}",
    "{t}[:, 1:3] = scale",
    "{t}[1:] = {a}[1:]",
    "{t}[..., 0] += 1",
    "{t}[pick] = {a}",
    "{t}[{a} > 0] = 0.75",
    "{t}.index_put_((pick,), {a})",
    "{t}.index_add_(0, pick, {a})",
    "cache[pick] = {a}",
)
ATTENTION = (
    "{v} = torch.empty_like({a})\ntoy.attn({a}, {v})",
    "{v} = torch.empty({a}.size())\ntoy.attn(out={v}, q={a})",
    "{v} = torch.empty_like({a})\ntoy.attn({a}[:, :2], {v}[:, :2])\ntoy.attn({a}[:, 2:], {v}[:, 2:])",
    "toy.attn({a}, {t})",
    "toy.attn({a}[:, :2], {t}[:, 2:])",
)
SPLITS = (
    "{v} = toy.fresh({a})",
    "{v} = toy.fresh(q={a})",
    "{u}, {v} = toy.tup({a})",
    "_, {v} = toy.tup({a})",
    "{u}, _, {v} = toy.three({a})",
    "{v} = toy.fresh(toy.tup({a})[1])",
    "toy.tick({a})",
)
STEPS = (
    "toy.kv_write({a}, step, cache)",
    "toy.context_write({a}, cache)",
    "{v} = step[:, None] * {a}",
)
METADATA = ("{t}.t_()", "{t}.unsqueeze_(0)", "{t}.transpose_(0, -1)", "{t}.squeeze_(0)")
KINDS = (MAKES, VIEWS, WRITES, ATTENTION, SPLITS, MAKES, VIEWS, WRITES, FILLS, SIZES, ALLOCATIONS, STEPS, METADATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function of PARAMETERS, its source, and the smallest token count it is valid for, beside those of TOKENS."""

    function: Callable[..., Any]
    source: str
    least: int

    def __repr__(self) -> str:
        return f"Program:\n{self.source}"


def make_arguments(n: int, seed: int) -> dict[str, Any]:
    """Fresh arguments for a call with n tokens; `y` is a strided view of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(ROWS, generator=generator)[:n]
    return {
        "x": torch.randn(n, WIDTH, generator=generator),
        "y": torch.randn(n, 2 * WIDTH, generator=generator)[:, 2 : 2 + WIDTH],
        "w": torch.randn(WIDTH, WIDTH, generator=generator),
        "cache": torch.randn(ROWS, WIDTH, generator=generator),
        "pick": torch.randperm(n, generator=generator),
        "step": torch.where(torch.arange(n) % 3 == 2, -1, slots),
        "k": 2 + seed % 2,
        "scale": 0.5 + seed % 3,
    }


@st.composite
def programs(draw: st.DrawFn, statements: int = 9) -> Program:
    """A strategy of programs with up to so many statements.

    What a statement is comes from a seed, since drawing each choice from hypothesis gives much the same programs again
    and again; whether it is there at all is drawn, so that a failing program shrinks to the statements it needs.
    """
    seed = draw(st.integers(0, 2**64 - 1))
    kept = draw(st.lists(st.integers(0, 255), min_size=statements, max_size=statements))
    builder = _Builder(random.Random(seed), LEAST[seed % len(LEAST)])
    with torch.no_grad(), _own_context():
        for position, keep in enumerate(kept):
            builder.choose = random.Random(f"{seed} {position} {keep}")
            if keep:
                builder.add_statement()
    return builder.finish()


@contextlib.contextmanager
def _own_context() -> Iterator[None]:
    """Let building leave no trace in the log of `tick` and in the step context."""
    logged, slots = len(LOG), StepContext.slots
    yield
    del LOG[logged:]
    StepContext.slots = slots


@dataclass
class _Builder:
    choose: random.Random
    least: int
    lines: list[str] = field(default_factory=list)
    scopes: list[dict[str, Any]] = field(init=False)  # the names of the program at each token count
    unfilled: set[str] = field(default_factory=set)  # tensors whose memory holds no data yet
    reshaped: set[str] = field(default_factory=set)  # tensors whose shape was changed in place
    mode: str | None = None
    mode_left: int = 0

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.scopes = [make_arguments(n, 0) for n in dict.fromkeys((*TOKENS, self.least))]

    def add_statement(self) -> None:
        if self.mode_left == 0:
            self.mode = None
            if self.choose.random() < 0.1:
                self.mode = self.choose.choice(sorted(_MODES))
                self.mode_left = self.choose.randint(1, 3)
                self.lines += [_MODES[self.mode], "    pass"]
        for _ in range(4):  # attempts
            kind = self.choose.choice(KINDS)
            statement = self._fill_in(self.choose.choice(kind), kind)
            if statement is not None and self._runs(statement):
                self._note_data(statement, kind)
                self.lines += [f"    {line}" if self.mode else line for line in statement.split("\n")]
                break
        self.mode_left = max(0, self.mode_left - 1)

    def finish(self) -> Program:
        readable = [name for name in self._names(Tensor) if self._has_data(name)]
        chosen = self.choose.sample(readable, min(len(readable), self.choose.randint(1, 4)))
        numbers = self._names(int)[:1]
        form = self.choose.choice(("return [{}]", "return ({},)", "return {{'first': [{}], 'none': None}}"))
        returned = form.format(", ".join([*chosen, *numbers]))
        body = [*self.lines, returned]
        source = "\n    ".join([f"def program({', '.join(PARAMETERS)}):", *body]) + "\n"
        return Program(function=_compiled(source), source=source, least=self.least)

    def _fill_in(self, template: str, kind: tuple[str, ...]) -> str | None:
        """The statement with operands drawn for it, or None where there is none of a sort."""
        fresh = len(self.lines)
        words = {"u": f"u{fresh}", "v": f"{'s' if kind is SIZES else 'v'}{fresh}"}
        floats = self._names(Tensor)
        pools = {
            "a": [name for name in floats if self._has_data(name) and self._suits(name, template)],
            "b": [name for name in floats if self._has_data(name)],
            "t": self._targets(template, kind),
            "s": self._names(torch.Size),
            "i": self._names(int),
        }
        for word, pool in pools.items():
            if f"{{{word}}}" in template:
                if not pool:
                    return None
                words[word] = self.choose.choice(pool[:3] + pool)  # rather the latest
        if template.startswith("torch.mm(") and self._share_memory(words["a"], words["t"]):
            return None  # torch neither refuses nor defines a product that overwrites its own factor
        return template.format(**words)

    def _targets(self, template: str, kind: tuple[str, ...]) -> list[str]:
        names = [name for name in self._names(Tensor) if kind is FILLS or self._has_data(name)]
        names = [name for name in names if 0 not in self.scopes[0][name].stride()]  # no expanded ones
        if template.startswith("torch."):  # Dynamo breaks the graph at an `out` that is strided, or gets another shape
            outs = {name: self.scopes[0][name] for name in names}
            return [name for name, out in outs.items() if out.is_contiguous() and out.numel()]
        if kind is METADATA:
            return [name for name in names if not any(_is_input(name, scope) for scope in self.scopes)]
        return names

    def _suits(self, name: str, template: str) -> bool:
        scope = self.scopes[0]
        reads_size = any(reader in template for reader in ("size(", ".shape", "numel("))
        if reads_size and any(scope[name] is scope[other] for other in self.reshaped):
            return False  # Dynamo keeps the sizes that a tensor had before its shape was changed in place
        if "[{a} > 0]" in template and scope[name].dim() == 0:
            return False  # Dynamo cannot trace a mask without dimensions
        if "as_strided" in template:  # not of an input: nobody knows what lies around it
            owned = not any(self._share_memory(name, given) for given in PARAMETERS[:4])
            return owned and scope[name].nbytes == scope[name].untyped_storage().nbytes()
        return True

    def _names(self, sort: type) -> list[str]:
        """Names of a sort that a program made or was given, the latest first."""
        scope = self.scopes[0]
        found = [n for n in scope if isinstance(scope[n], sort) and n not in ("w", "k", "scale", "pick", "step", "_")]
        return found[::-1]

    def _has_data(self, name: str) -> bool:
        return not any(self._share_memory(name, other) for other in self.unfilled)

    def _share_memory(self, name: str, other: str) -> bool:
        scope = self.scopes[0]
        return bool(scope[name].untyped_storage()._cdata == scope[other].untyped_storage()._cdata)

    def _runs(self, statement: str) -> bool:
        """Run it at each token count; whether eager accepts it everywhere."""
        indented = statement.replace("\n", "\n    ")
        code = f"{_MODES[self.mode]}\n    {indented}" if self.mode else statement
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a resized `out`
                self._execute(code)
        except (RuntimeError, IndexError, ValueError, TypeError, UserWarning):
            self._start()  # half a statement may have changed a shape
            self._execute("\n".join(self.lines) or "pass")
            return False
        return True

    def _execute(self, code: str) -> None:
        for scope in self.scopes:
            StepContext.slots = torch.arange(len(scope["pick"]))
            exec(code, {"torch": torch, "toy": torch.ops.toy}, scope)

    def _note_data(self, statement: str, kind: tuple[str, ...]) -> None:
        if kind is METADATA:
            self.reshaped.add(_target(statement))
        if kind is ALLOCATIONS:
            self.unfilled.add(statement.partition(" =")[0])
        if kind is FILLS:
            filled = self.scopes[0][name := _target(statement)]
            if filled.nbytes == filled.untyped_storage().nbytes():
                self.unfilled -= {other for other in self.unfilled if self._share_memory(name, other)}


def _is_input(name: str, scope: dict[str, Any]) -> bool:
    """The caller's own tensor, perhaps under another name (`y.contiguous()` may be `y`): its shape is not ours."""
    return any(scope[name] is scope[parameter] for parameter in PARAMETERS)


def _target(statement: str) -> str:
    """The name of the tensor that a statement of FILLS or METADATA changes."""
    if "out=" in statement:
        return statement.partition("out=")[2].partition(")")[0]
    if statement.startswith("toy."):
        return statement.rpartition(", ")[2].rstrip(")")
    return statement.partition(".")[0]


def _compiled(source: str) -> Callable[..., Any]:
    """The function, with its source known to tracebacks and to Dynamo."""
    name = f"<program {zlib.crc32(source.encode()):08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "toy": torch.ops.toy}
    exec(compile(source, name, "exec"), scope)
    return scope["program"]
