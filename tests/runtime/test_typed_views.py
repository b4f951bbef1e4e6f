"""One storage under several dtypes: codes and scales written through views, the bytes read as they lie.

A kernel may take a page as uint8, its codes as 8-bit floats and its scales as fp32. Whose write a read must follow is
decided by storage and bytes, whatever dtype each of them is seen as.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from runtime_helpers import compile_host
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import counters

WIDTH, PAGES = 8, 16
LIBRARY = torch.library.Library("typed_views", "FRAGMENT")
LIBRARY.define("put(Tensor x, Tensor slots, Tensor(a!) codes, Tensor(b!) scales) -> ()")
LIBRARY.define("get(Tensor x, Tensor pages, Tensor(a!) out) -> ()")


def put(x: Tensor, slots: Tensor, codes: Tensor, scales: Tensor) -> None:
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)  # a row of zeros has codes too
    codes[slots] = (x / scale).to(torch.float8_e4m3fn)
    scales[slots] = scale


def get(x: Tensor, pages: Tensor, out: Tensor) -> None:
    codes = pages[:, :WIDTH].view(torch.float8_e4m3fn).float()
    out.copy_(x + (codes * pages[:, WIDTH:].contiguous().view(torch.float32)).sum(0))


for name, function in (("put", put), ("get", get)):
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"typed_views::{name}", lambda *arguments: None, lib=LIBRARY)


@pytest.fixture(autouse=True)
def _roles() -> None:
    dsv4_compile.register_op("typed_views::get", role="split", tokens="x")
    dsv4_compile.register_op("typed_views::put", role="prepare", step_state=("slots",))


def typed(pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return pages, pages[:, :WIDTH].view(torch.float8_e4m3fn), pages[:, WIDTH:].view(torch.float32)


class Model(nn.Module):
    """Puts and gets twice; its views are made in it, are buffers, or are arguments, marked static or not."""

    def __init__(self, views: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))
        self.views = views
        parts = typed(torch.zeros(PAGES, WIDTH + 4, dtype=torch.uint8))
        for name, part in zip(("pages", "codes", "scales"), parts, strict=True):
            self.register_buffer(name, part)

    def forward(self, x: Tensor, slots: Tensor, *given: Tensor) -> Tensor:
        pages, codes, scales = given or (typed(self.pages) if self.views == "made" else self._bound())
        h = x @ self.w
        for shift in (0, PAGES // 2):
            torch.ops.typed_views.put(h, slots + shift, codes, scales)
            out = torch.empty_like(h)
            torch.ops.typed_views.get(h, pages, out)
            h = torch.relu(out) @ self.w
        return h

    def _bound(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.pages, self.codes, self.scales


CASES = list(
    product(("made", "buffers", "marked", "unmarked"), ("mrv1", "mrv2"), ("runner", "minimal"), ("addresses", "full"))
)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("views", "runner", "region", "check"), CASES)
def test_what_is_written_through_a_view_is_read_through_another(
    views: str, runner: str, region: str, check: str
) -> None:
    models = Model(views), Model(views)
    compiled = compile_host(models[0], runner=runner, region=region, check=check)
    given = [typed(model.pages) if views.endswith("marked") else () for model in models]
    for part in given[0] if views == "marked" else ():
        torch._dynamo.mark_static_address(part)
    slots = torch.zeros(4, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(4, WIDTH)
            slots.copy_(torch.randperm(PAGES // 2)[:4])
            assert torch.equal(compiled(x, slots, *given[0]), models[1](x, slots, *given[1]))
            assert torch.equal(models[0].pages, models[1].pages)
    # views that are neither static nor apart run uncaptured where one of them is written
    assert (counters.replays == 0) if views == "unmarked" else (counters.replays >= 4)
