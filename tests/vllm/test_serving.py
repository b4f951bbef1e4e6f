"""vLLM serves tiny models through the plugin, with the tokens that it gives under enforce_eager."""

from __future__ import annotations

import pytest
from vllm_models import ASKED, SIZES, run, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PLAIN = {"additional_config": {"dsv4_compile": {}}}
GRAPHS = {"mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": SIZES}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_everything_is_captured_before_the_first_request(model, eager, kind: str) -> None:
    served = serve(model(kind), ASKED)
    assert served.rounds == eager(kind).rounds
    assert served.ready["captures"] == len(SIZES)
    assert set(served.served) == {"replays", "eager_op_calls"}


def test_without_sizes_each_length_is_captured_while_it_is_served(model, eager) -> None:
    served = serve(model("dense"), PLAIN)
    assert served.rounds == eager("dense").rounds
    assert served.mode == 2


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_in_mode_3_vllm_itself_pads_and_captures(model, eager, kind: str) -> None:
    served = serve(model(kind), {**PLAIN, "graphs": True, "compilation_config": GRAPHS})
    assert served.mode == 3
    assert served.rounds == eager(kind).rounds
    assert served.ready["captures"] == served.ready["uncaptured_calls"] == len(SIZES)
    assert set(served.served) == {"replays", "eager_op_calls"}


@pytest.mark.parametrize("shapes", ["backed", "backed_size_oblivious", "unbacked"])
def test_sizes_are_dynamic_in_each_way_that_vllm_knows(model, eager, shapes: str) -> None:
    served = serve(model("dense"), {**ASKED, "compilation_config": {"dynamic_shapes_config": {"type": shapes}}})
    assert served.rounds == eager("dense").rounds
    assert "uncaptured_calls" not in served.served


def test_the_backend_can_be_named(model, eager) -> None:
    named = {"mode": 2, "backend": "dsv4_compile.integrations.vllm.backend"}
    assert serve(model("dense"), {"compilation_config": named}).rounds == eager("dense").rounds


def test_the_plain_name_raises_before_it_would_serve_wrong_tokens(model) -> None:
    done = run(model("dense"), {"compilation_config": {"mode": 2, "backend": "dsv4_piecewise"}})
    assert done.returncode != 0
    assert "HazardError: op vllm::" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"additional_config": {"dsv4_compile": {"regoin": "wide"}}}, "OptionError: additional_config: unknown option"),
        ({**PLAIN, "enforce_eager": True}, "UnsupportedConfigError: dsv4_compile in vLLM: nothing would be compiled"),
        ({**PLAIN, "compilation_config": {"mode": 1}}, "compiles nothing in mode 1: set mode 2 or 3"),
    ],
)
def test_a_mistake_is_told_before_the_model_loads(model, arguments: dict, message: str) -> None:
    done = run(model("dense"), arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Loading safetensors" not in done.stderr
