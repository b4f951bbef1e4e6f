"""The model under Dynamo: one graph for every token count from two up, step state as inputs, ops by name."""

import dataclasses

import pytest
import torch
from paging import Paging, tiny_config

from dsv4_compile.models.deepseek_v4 import AttentionStack, StepState, bind_caches

CONFIG = tiny_config(ratios=(0, 4, 128, 4))
REQUEST_STATE = [f.name for f in dataclasses.fields(StepState) if f.name.endswith(("table", "loc", "lens"))]
OPS_OF_KIND = {
    0: ["fused_q_kv_rmsnorm", "qnorm_rope_kv_insert", "forward_mqa", "inverse_rope"],
    4: [
        "fused_q_kv_rmsnorm",
        "qnorm_rope_kv_insert",
        "compress_kv_insert",
        "indexer_q_rope",
        "compress_kv_insert",
        "sparse_indexer",
        "forward_mqa",
        "inverse_rope",
    ],
    128: ["fused_q_kv_rmsnorm", "qnorm_rope_kv_insert", "compress_kv_insert", "forward_mqa", "inverse_rope"],
}


class Traced:
    """A model compiled by a backend that keeps the graphs and runs them as they are, and its eager model."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = []
        self.model, self.eager = AttentionStack(CONFIG), AttentionStack(CONFIG)
        self.paging = Paging(CONFIG, [400, 300])
        bind_caches(self.model, self.paging.caches())
        bind_caches(self.eager, self.paging.caches())
        self.compiled = torch.compile(self.model, backend=self.keep, fullgraph=True, dynamic=True)

    def keep(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward

    def check(self, spans, *, padding=0):
        positions, step = self.paging.step(spans, padding=padding)
        for name in REQUEST_STATE:
            torch._dynamo.mark_static(getattr(step, name))
        ids = torch.arange(len(positions)) % CONFIG.vocab_size
        with torch.no_grad():
            expected = self.eager(ids, positions, step)
            assert torch.equal(self.compiled(ids, positions, step), expected)
        for (name, ours), theirs in zip(self.model.named_buffers(), self.eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.fixture
def traced():
    yield Traced()
    torch._dynamo.reset()


def ops_of(graph):
    return [str(node.target).removeprefix("dsv4.") for node in graph.graph.nodes if "dsv4." in str(node.target)]


def test_one_graph_for_every_token_count_from_two_up(traced):
    for count in (2, 3, 4, 7, 64, 128, 129, 300):
        traced.check([(0, 0, count)])
    traced.check([(0, 300, 1), (1, 0, 5)], padding=2)
    traced.check([(0, 301, 1), (1, 5, 1)])
    assert len(traced.graphs) == 1


@pytest.mark.exhaustive
def test_one_token_is_a_second_graph_and_right(traced):
    traced.check([(0, 0, 9)])
    traced.check([(0, 9, 1)])
    traced.check([(0, 10, 1)])
    traced.check([(0, 11, 9)])
    assert len(traced.graphs) == 2
    assert not [node for node in traced.graphs[1].graph.nodes if node.type is torch.SymInt]


@pytest.mark.exhaustive
def test_starting_with_one_token_is_right_too(traced):
    for span in [(0, 0, 1), (0, 1, 5), (0, 6, 1), (0, 7, 2)]:
        traced.check([span])
    assert len(traced.graphs) == 2


def test_ops_are_visible_by_name_in_program_order(traced):
    traced.check([(0, 0, 9)])
    expected = [op for ratio in CONFIG.compress_ratios for op in OPS_OF_KIND[ratio]]
    assert ops_of(traced.graphs[0]) == expected


def test_the_input_gemms_come_first_and_side_by_side(traced):
    traced.check([(0, 0, 9)])
    calls = [n for n in traced.graphs[0].graph.nodes if n.op in ("call_function", "call_method")]
    norms = [i for i, node in enumerate(calls) if node.target is torch.rms_norm]
    for norm, ratio in zip(norms, CONFIG.compress_ratios, strict=False):
        gemms = {0: 1, 4: 4, 128: 2}[ratio]
        following = calls[norm + 1 : norm + 1 + gemms]
        assert [node.target for node in following] == [torch._C._nn.linear] * gemms
        assert all(node.args[0] is calls[norm] for node in following)


def test_step_state_is_graph_input_and_nothing_else_is_new_each_call(traced):
    traced.check([(0, 0, 9)])
    inputs = {n.name for n in traced.graphs[0].graph.nodes if n.op == "placeholder"}
    step_inputs = {name.removeprefix("l_step_") for name in inputs if name.startswith("l_step_")}
    # the model reads no lengths: positions and request rows say it all
    assert step_inputs == {f.name for f in dataclasses.fields(StepState)} - {"query_start_loc", "seq_lens"}
    others = {name for name in inputs if not name.startswith(("l_step_", "l_self_modules_"))}
    assert others == {
        "l_input_ids_",
        "l_positions_",
        *(name for name in others if name[0] == "s" and name[1:].isdigit()),
    }
    assert len(others) == 3


def test_every_input_of_the_module_is_a_parameter_or_a_buffer(traced):
    # a float attribute would be a tensor input with an .item(), made anew on each call
    traced.check([(0, 0, 9)])
    names = [n.name for n in traced.graphs[0].graph.nodes if n.op == "placeholder" and n.name.startswith("l_self_")]
    assert all("_parameters_" in name or "_buffers_" in name for name in names)
    assert not [n for n in traced.graphs[0].graph.nodes if n.target == "item"]


def test_caches_and_buffers_are_static_inputs():
    seen = {}

    def backend(graph, example_inputs):
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        for node, value in zip(placeholders, example_inputs, strict=True):
            seen[node.name] = hasattr(value, "_dynamo_static_input_type")
        return graph.forward

    traced = Traced()
    traced.compiled = torch.compile(traced.model, backend=backend, fullgraph=True, dynamic=True)
    traced.check([(0, 0, 9)])
    buffers = {name: static for name, static in seen.items() if "_buffers_" in name}
    # 4 windows, 3 compressed caches and states, twice indexer keys and states, 2 tables, one selection
    assert len(buffers) == 4 + 3 + 3 + 2 + 2 + 2 + 1
    assert all(buffers.values())
    assert not any(static for name, static in seen.items() if name.startswith("l_step_"))
    torch._dynamo.reset()


def test_caches_bound_anew_are_used_without_another_graph(traced):
    traced.check([(0, 0, 9)])
    bind_caches(traced.model, traced.paging.caches())
    bind_caches(traced.eager, traced.paging.caches())
    traced.check([(0, 0, 5)])
    assert len(traced.graphs) == 1
