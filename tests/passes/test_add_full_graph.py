"""Which graphs are planned as a whole for uniform decode, what that plan shows, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_ops import ROWS, WIDTH, batch, decode, register
from expecttest import assert_expected_inline
from stages import stages_of
from torch import Tensor, fx

import dsv4_compile
from dsv4_compile import passes, register_op
from dsv4_compile.analysis.dependencies import predecessors, signature
from dsv4_compile.errors import FullGraphError, HazardError, OptionError, PlanError
from dsv4_compile.graph.partitioned import PartitionedGraph
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.inspect.report.dump_folder import plan_from_json

toy = torch.ops.toy


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def layer(x: Tensor, w: Tensor, slots: Tensor, lens: Tensor, cache: Tensor) -> Tensor:
    q = x @ w
    decode.insert(q, slots, cache)
    out = torch.empty_like(q)
    decode.attend(q, cache, lens, out)
    return out + 1


def arguments(tokens: int = 5) -> tuple[Tensor, ...]:
    x, slots, lens = batch(tokens, 0)
    return x, torch.eye(WIDTH), slots, lens, torch.zeros(ROWS, WIDTH)


def plan(function: Callable[..., Any] = layer, *args: Any, **options: Any) -> Plan:
    return dsv4_compile.explain(function, *(args or arguments()), options={"runner": "mrv2", **options})


def test_the_plan_shows_both() -> None:
    text = str(plan())
    assert_expected_inline(
        text.partition("\n\ninputs\n")[0],
        """\
plan: runner mrv2 (asked for), region narrow
sizes: s77 = x.size()[0] (tokens), s27 = x.size()[1], s0 = cache.size()[0]
2 pieces captured (3 ops), 1 region eager (1 op)
uniform decode: 1 piece captured (4 ops), nothing eager

piece_0  captured, 2 ops
    ops       matmul, decode::insert
    inputs    user input: x, w, cache
              step state: slots
    outputs   q [s77, s27] float32

region_0  eager, 1 op
    decode::attend  split op
    inputs    q
              user input: cache, lens
    outputs   out [s77, s27] float32

piece_1  captured, 1 op
    ops       add
    inputs    out
    outputs   add [s77, s27] float32

whole_step  captured in uniform decode, 4 ops
    ops       matmul, decode::insert, decode::attend, add
    inputs    user input: x, w, cache, lens
              step state: slots
    outputs   add [s77, s27] float32""",
    )
    assert_expected_inline(
        text.partition("\n\nworkspace")[2],
        """\
 at s77 = 5, s27 = 8, s0 = 16
    1024 bytes planned, 1024 is the lower bound, 1536 if nothing were shared
           0  l_x_ (256 bytes, start to piece_0)
           0  out (256 bytes, region_0 to piece_1)
         256  l_w_ (256 bytes, start to piece_0)
         256  add (256 bytes, piece_1 to end)
         512  l_slots_ (256 bytes, start to piece_0)
         768  q (256 bytes, piece_0 to region_0)

workspace in uniform decode at s77 = 5, s27 = 8, s0 = 16
    1280 bytes planned, 1280 is the lower bound, 1280 if nothing were shared
           0  l_x_ (256 bytes, start to whole_step)
         256  l_w_ (256 bytes, start to whole_step)
         512  l_slots_ (256 bytes, start to whole_step)
         768  l_lens_ (256 bytes, start to whole_step)
        1024  add (256 bytes, whole_step to end)""",
    )
    assert plan_from_json(plan().to_json()) == plan()


def test_the_whole_step_is_the_same_graph_in_the_same_order() -> None:
    for region in ("narrow", "wide", "minimal"):
        _, graph, _ = stages_of(layer, *arguments(), region=region, runner="mrv2")
        assert graph.full is not None
        (unit,) = graph.full.units
        assert list(unit.nodes) == [node for unit in graph.units for node in unit.nodes]
        effects = graph.traced.effects
        assert signature(unit.nodes, effects) == signature(graph.traced.compute_nodes(), effects)
        assert graph.full.traced.eager == {}
        assert graph.full.token_count == graph.token_count


def test_nothing_runs_beside_a_split_op() -> None:
    """It may keep state that no schema shows; as an eager op it finds all work before it done."""

    def branches(x: Tensor, w: Tensor) -> Tensor:
        q, r = (x @ w).sin(), (x @ w.t()).cos()
        out = torch.empty_like(q)
        decode.fill(q, out)
        return out @ w + r @ w + (r @ w).sin()

    _, graph, _ = stages_of(branches, torch.randn(8, 8), torch.randn(8, 8), aux_streams=3)
    assert graph.full is not None
    assert len(set(graph.full.streams.values())) > 0
    nodes = graph.full.units[0].nodes
    edges = predecessors(nodes, graph.full.traced.effects)
    before: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        before[node] = edges[node].union(*[before[other] for other in edges[node]])
    place = next(index for index, node in enumerate(nodes) if "fill" in node.name)
    assert 0 < place < len(nodes) - 1
    assert before[nodes[place]] == set(nodes[:place])
    assert all(nodes[place] in before[node] for node in nodes[place + 1 :])


def default_text(function: Callable[..., Any], *args: Any) -> str:
    return str(plan(function, *args, split_ops=["toy::fresh"]))


def test_without_a_promise_nothing_is_planned_or_said() -> None:
    def step(x: Tensor) -> Tensor:
        return toy.fresh(x + 1) * 2

    x = torch.randn(5, 4)
    assert "uniform decode" not in default_text(step, x)
    assert default_text(step, x) == str(plan(step, x, split_ops=["toy::fresh"], decode="piecewise"))


def test_the_option_piecewise_plans_pieces_alone() -> None:
    assert plan(decode="piecewise").full is None
    assert "uniform decode" not in str(plan(decode="piecewise"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capturable", ["decode", "always", {"cpu": "decode", "cuda": "never"}, {"cpu": "always"}])
def test_what_is_a_promise(capturable: Any) -> None:
    register(attend=capturable)
    assert plan(decode="full").full is not None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capturable", ["never", {"cuda": "decode"}, {"cpu": "never"}])
def test_what_is_none_on_this_device(capturable: Any) -> None:
    register(attend=capturable)
    assert plan().full is None
    with pytest.raises(FullGraphError, match=r"not registered as capturable: decode::attend \(such as .*attend"):
        plan(decode="full")


def test_each_op_without_a_promise_is_listed() -> None:
    def step(x: Tensor) -> Tensor:
        first, second = toy.tup(toy.fresh(x))
        return toy.three(first)[0] + second

    options = {"split_ops": ["toy::fresh", "toy::tup", "toy::three"]}
    with pytest.raises(FullGraphError, match=r"capturable: toy::fresh, toy::tup, toy::three \(such as .*toy.fresh"):
        plan(step, torch.randn(5, 4), decode="full", **options)
    register_op("toy::fresh", role="split", capturable="decode")
    notes = plan(step, torch.randn(5, 4), **options).notes
    assert notes[0].startswith("uniform decode runs in pieces: not registered as capturable: toy::tup, toy::three (")


def item(x: Tensor) -> Tensor:
    return decode_fill(x) * x.sum().item()


def nonzero(x: Tensor) -> Tensor:
    return decode_fill(x)[x[:, 0].nonzero().squeeze(1)].sum(0)


def split_on_rows_that_data_selects(x: Tensor) -> Tensor:
    return decode_fill(x[x[:, 0] > 0])


def checked(x: Tensor) -> Tensor:
    torch._check(x.sum().item() < 1e9)
    return decode_fill(x)


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (decode_fill(x),))


def tagged(x: Tensor) -> Tensor:
    return torch.ops.full_graph_test.unsafe(decode_fill(x))


def decode_fill(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    decode.fill(x, out)
    return out


LIBRARY = torch.library.Library("full_graph_test", "FRAGMENT")
LIBRARY.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("unsafe", lambda x: x + 1, "CompositeExplicitAutograd")
torch.library.register_fake("full_graph_test::unsafe", torch.empty_like, lib=LIBRARY)

HINDRANCES = [
    (item, r"item needs a device-to-host sync \(.*x\.sum\(\)\.item\(\)"),
    (nonzero, r"nonzero returns a tensor whose size depends on data"),
    (split_on_rows_that_data_selects, r"depends on data"),
    (checked, r"checks a number on the host|device-to-host sync"),
    (branch, r"higher-order op cond decides on the host what it runs"),
    (tagged, r"full_graph_test::unsafe\.default is tagged cudagraph_unsafe"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("function", "reason"), HINDRANCES, ids=[function.__name__ for function, _ in HINDRANCES])
def test_what_no_graph_can_hold_keeps_the_step_in_pieces(function: Callable[..., Any], reason: str) -> None:
    x = torch.randn(5, 4)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        with pytest.raises(FullGraphError, match=f'decode="full", but the whole step cannot be one graph: .*{reason}'):
            plan(function, x, decode="full")
        (note,) = [note for note in plan(function, x).notes if note.startswith("uniform decode runs in pieces: ")]
        assert re.search(reason, note)
        assert plan(function, x, decode="piecewise").notes == ()


def test_the_old_runner_is_refused_where_step_state_moves() -> None:
    hazard = r"op decode::insert\.default reads the step state slots through its argument 'slots'"
    with pytest.raises(HazardError, match=rf'with decode="full", {hazard}, but it would be captured under mrv1, at .*'):
        plan(runner="mrv1", decode="full")
    (note,) = [note for note in plan(runner="mrv1").notes if "uniform decode" in note]
    assert note.startswith("uniform decode runs in pieces: op decode::insert.default reads the step state slots ")
    register_op("decode::insert", role="capture")
    assert plan(runner="mrv1", decode="full").full is not None  # nothing says that a runner replaces it


def test_a_split_op_that_reads_step_state_is_a_hazard_too() -> None:
    register_op("decode::insert", role="capture")
    register_op("decode::attend", role="split", step_state=("lens",), capturable="decode")
    with pytest.raises(HazardError, match=r"op decode::attend\.default reads the step state lens"):
        plan(runner="mrv1", decode="full")
    register_op("decode::attend", role="split", reads_context=True, capturable="decode")
    with pytest.raises(HazardError, match=r"op decode::attend\.default reads the step context"):
        plan(runner="mrv1", decode="full")
    assert plan(runner="mrv2", decode="full").full is not None


def test_a_graph_without_split_ops() -> None:
    def whole(x: Tensor) -> Tensor:
        return x.sin() + 1

    def with_sync(x: Tensor) -> Tensor:
        return x * x.sum().item()

    x = torch.randn(5, 4)
    assert plan(whole, x, decode="full").full is None  # one piece as it is
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert plan(with_sync, x).full is None
        with pytest.raises(FullGraphError, match="item needs a device-to-host sync"):
            plan(with_sync, x, decode="full")


def test_a_graph_of_which_no_call_is_captured() -> None:
    def gives_memory(x: Tensor, y: Tensor) -> Tensor:
        y.data = x * 2
        return decode_fill(y)

    x = torch.randn(5, 4)
    with pytest.raises(FullGraphError, match="memory"):
        plan(gives_memory, x, torch.randn(5, 4), decode="full")
    assert plan(gives_memory, x, torch.randn(5, 4)).full is None


def test_unbacked_sizes_of_inputs_are_no_hindrance() -> None:
    x = torch.randn(5, 8)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    assert plan(decode_fill, x, decode="full").full is not None


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(OptionError, match=r"option decode='ful' is not valid: did you mean 'full'\? Valid: auto, full"):
        plan(decode="ful")
    for wrong in (True, None, 1, ["full"]):
        with pytest.raises(OptionError, match="option decode="):
            plan(decode=wrong)


def test_the_checks_of_a_partition_judge_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[PartitionedGraph] = []

    def check(graph: PartitionedGraph) -> PartitionedGraph:
        checked.append(graph)
        if len(checked) == 2:
            raise PlanError("the second one")
        return graph

    monkeypatch.setattr(passes, "check_partition", check)
    with pytest.raises(PlanError, match="the second one"):
        plan()
    assert [len(graph.units) for graph in checked] == [3, 1]
