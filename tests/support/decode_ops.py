"""Split ops for full graphs, in the namespace `decode`: some keep to the rules in uniform decode, some break them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

import dsv4_compile
from dsv4_compile import uniform_decode, uniform_query_len

LIBRARY = Library("decode", "FRAGMENT")
WIDTH, ROWS = 8, 16
FACTOR = [2.0]  # what `frozen` reads, on the host


def _insert(kv: Tensor, slots: Tensor, cache: Tensor) -> None:
    cache.index_copy_(0, slots, kv)


def _attend(q: Tensor, cache: Tensor, lens: Tensor, out: Tensor) -> None:
    """Adds the first lens[t] rows of the cache to row t; in other batches than decode it only looks at the longest."""
    longest = len(cache) if uniform_query_len() is not None or not len(lens) else int(lens.max())
    seen = torch.arange(longest, device=q.device) < lens[:, None]
    torch.add(q, seen.to(q.dtype) @ cache[:longest], out=out)


def _attend_on_host(q: Tensor, cache: Tensor, lens: Tensor, out: Tensor) -> None:
    """Breaks its promise: it asks for the longest in any batch."""
    longest = int(lens.max())
    seen = torch.arange(longest) < lens[:, None]
    torch.add(q, seen.to(q.dtype) @ cache[:longest], out=out)


def _frozen(q: Tensor, out: Tensor) -> None:
    """Breaks its promise, and no capture can see it: it reads a number of the host that no tensor shows."""
    torch.mul(q, FACTOR[0], out=out)


def _sometimes_on_host(x: Tensor) -> Tensor:
    """No split op, and promises nothing: in uniform decode it decides on the host."""
    return x * 2 if uniform_query_len() is None or x.sum() > 0 else x * 3


def _fill(q: Tensor, out: Tensor) -> None:
    torch.mul(q, 2, out=out)


def _note(q: Tensor) -> None:
    """Declares no effect; what it writes is reached through a global."""
    NOTED[: len(q)].copy_(q)


NOTED = torch.zeros(ROWS, WIDTH)


def _define(schema: str, body: Callable[..., Any], fake: Callable[..., Any] = lambda *args: None) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"decode::{name}", fake, lib=LIBRARY)


_define("insert(Tensor kv, Tensor slots, Tensor(a!) cache) -> ()", _insert)
_define("attend(Tensor q, Tensor cache, Tensor lens, Tensor(a!) out) -> ()", _attend)
_define("attend_on_host(Tensor q, Tensor cache, Tensor lens, Tensor(a!) out) -> ()", _attend_on_host)
_define("frozen(Tensor q, Tensor(a!) out) -> ()", _frozen)
_define("fill(Tensor q, Tensor(a!) out) -> ()", _fill)
_define("note(Tensor q) -> ()", _note)
_define("sometimes_on_host(Tensor x) -> Tensor", _sometimes_on_host, torch.empty_like)
decode = torch.ops.decode


def register(**capturable: Any) -> None:
    """Register the split ops as capturable in decode, or as the keyword of an op says; `insert` prepares."""
    given = {"attend": "decode", "attend_on_host": "decode", "frozen": "decode", "fill": "decode", **capturable}
    for name, promise in given.items():
        dsv4_compile.register_op(f"decode::{name}", role="split", capturable=promise)
    dsv4_compile.register_op("decode::insert", role="prepare", step_state=("slots",))


class Decoder(nn.Module):
    """Layers of a projection, an insert into a cache, attention over it, a projection back and a residual."""

    def __init__(self, layers: int, attend: Any = decode.attend) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(layers)
        self.attend = attend
        self.down, self.up = (nn.ParameterList(self._weight(generator) for _ in range(layers)) for _ in range(2))
        for index in range(layers):
            self.register_buffer(f"cache_{index}", torch.zeros(ROWS, WIDTH))

    @staticmethod
    def _weight(generator: torch.Generator) -> nn.Parameter:
        return nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH, requires_grad=False)

    def forward(self, x: Tensor, slots: Tensor, lens: Tensor) -> Tensor:
        """[tokens, WIDTH] to the same."""
        for index, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            cache = self.get_buffer(f"cache_{index}")
            q = (x @ down).tanh()
            decode.insert(q, slots, cache)
            out = torch.empty_like(q)
            self.attend(q, cache, lens, out)
            x = x + out @ up
        return x


def batch(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of random rows, in slots and with lengths of their own."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(ROWS, generator=generator)[:tokens]
    return torch.randn(tokens, WIDTH, generator=generator), slots, slots + 1


class DecodeTrial:
    """A decoder compiled, and its copy in eager, that go through the same calls."""

    def __init__(self, layers: int = 2, attend: Any = decode.attend, **options: Any) -> None:
        self.model, self.eager = Decoder(layers, attend), Decoder(layers, attend)
        given = {"engine": "host", "runner": "mrv2", **options}
        self.compiled = torch.compile(self.model, backend="dsv4_piecewise", dynamic=True, options=given)
        self.is_exact = given.get("piece_compiler") != "inductor"
        self.is_compared = True
        self.calls = 0

    @torch.no_grad()
    def call(self, tokens: int, query_len: int | None = None) -> Tensor:
        """One call of both, in uniform decode unless `query_len` is None: results and caches are the same."""
        self.calls += 1
        arguments = batch(tokens, self.calls)
        with uniform_decode(query_len) if query_len is not None else nullcontext():
            wanted = self.eager(*[argument.clone() for argument in arguments])
            result: Tensor = self.compiled(*arguments)
        if not self.is_compared:
            return result
        self._compare(result, wanted)
        for ours, theirs in zip(self.model.buffers(), self.eager.buffers(), strict=True):
            self._compare(ours, theirs)
            ours.copy_(theirs)  # what Inductor rounds otherwise must not add up
        return result

    def _compare(self, ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if self.is_exact else {}))

    def times(self, count: int, tokens: int, query_len: int | None = None) -> None:
        for _ in range(count):
            self.call(tokens, query_len)
