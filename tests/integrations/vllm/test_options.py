"""What `--additional-config` asks for is checked before a model loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsv4_compile.errors import OptionError
from dsv4_compile.integrations.vllm.options import VllmOptions, read_options


@pytest.mark.parametrize("given", [None, {}, {"gdn_prefill_backend": "triton"}, SimpleNamespace()])
def test_nothing_is_asked_for(given: object) -> None:
    assert read_options(given) is None


def test_options_of_the_backend_and_of_the_integration_are_told_apart() -> None:
    options = read_options({"dsv4_compile": {"region": "wide", "pad": False}, "other": 1})
    assert options == VllmOptions(pad=False, backend={"region": "wide"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dsv4_compile": {"regoin": "wide"}}, "unknown option 'regoin' of dsv4_compile: did you mean 'region'?"),
        ({"dsv4_compile": {"pda": True}}, "unknown option 'pda' of dsv4_compile: did you mean 'pad'?"),
        ({"dsv4_compile": {"backend": {}}}, "unknown option 'backend' of dsv4_compile"),
        ({"dsv4_compile": {"region": "wid"}}, "option region='wid' is not valid: did you mean 'wide'?"),
        ({"dsv4_compile": {"pad": 1}}, "option pad=1 must be True or False"),
        ({"dsv4_compile": {"capture_sizes": []}}, "option capture_sizes=.* names no size"),
        ({"dsv4_compile": True}, "dsv4_compile=True; it must be a dict"),
        ({"dsv4-compile": {}}, "additional_config has 'dsv4-compile': did you mean 'dsv4_compile'?"),
    ],
)
def test_a_mistake_is_named(given: object, message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("?", r"\?")):
        read_options(given)


def test_what_the_user_says_wins_over_what_vllm_tells() -> None:
    told = VllmOptions(backend={"runner": "mrv2"}).for_backend(runner="mrv1", capture_sizes=[1, 2])
    assert told == {"runner": "mrv2", "capture_sizes": [1, 2]}
    assert VllmOptions().for_backend(runner="mrv1", capture_sizes=[]) == {"runner": "mrv1"}
