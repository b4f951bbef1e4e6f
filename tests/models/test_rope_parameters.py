"""RoPE as a configuration asks for it, per entry: the tables of transformers' own layer, or a refusal that says why."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import tiny_hf_config
from released_configs import RELEASED
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from dsv4_compile.errors import UnsupportedConfigError
from dsv4_compile.models.deepseek_v4 import DeepseekV4Config, LayerKind, LinearScaling, YarnScaling, build_cos_sin

ENTRIES = ("main", "compress")
KINDS = {"main": (LayerKind.SWA,), "compress": (LayerKind.C4A, LayerKind.C128A)}
# head_dim, part of it that rotates, positions
SHAPES = ((32, 0.25, 1024), (64, 0.5, 300), (512, 0.125, 2048), (20, 1.0, 70))
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "no type": {},
    "linear by 4": {"rope_type": "linear", "factor": 4.0},
    "linear by 1": {"rope_type": "linear", "factor": 1},
    "linear by 2.5, type": {"type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn, attention factor 1": {**YARN, "attention_factor": 1.0},
    "yarn, attention factor 0.7": {**YARN, "attention_factor": 0.7},
    "yarn, attention factor null": {**YARN, "attention_factor": None},
    "yarn, betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2},
    "yarn, betas null": {**YARN, "beta_fast": None, "beta_slow": None},
    "yarn, beta 0": {**YARN, "beta_fast": 0, "beta_slow": 0},
    "yarn, mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.4},
    "yarn, one mscale": {**YARN, "mscale": 0.707},
    "yarn, mscales 0": {**YARN, "mscale": 0, "mscale_all_dim": 0},
    "yarn, mscales that are not read": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.4, "attention_factor": 1.1},
    "yarn, factor 3": {**YARN, "factor": 3},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
    "yarn, factor null": {**YARN, "factor": None},
    "yarn, no original length": {"rope_type": "yarn", "factor": 3.0},
    "yarn, long": {**YARN, "original_max_position_embeddings": 65536},
    "yarn, truncate": {**YARN, "truncate": True},
}


def hf_config(shape: tuple[int, float, int], main: dict[str, Any], compress: dict[str, Any], **values: Any) -> Any:
    """A configuration of transformers with two entries, each with its own base."""
    head_dim, fraction, positions = shape
    own = {"partial_rotary_factor": fraction}
    entries = {
        "main": {"rope_theta": 500.0, **own, **main},
        "compress": {"rope_theta": 70000.0, **own, **compress},
    }
    sizes = {"head_dim": head_dim, "index_head_dim": head_dim, "max_position_embeddings": positions}
    parameters = {"rope_parameters": copy.deepcopy(entries), "qk_rope_head_dim": None}
    return tiny_hf_config(**{**sizes, **parameters, **values})


def assert_tables_equal(hf: Any, ours: DeepseekV4Config) -> None:
    """Cosines, sines, frequencies and attention scaling of both entries, at every position."""
    layer = DeepseekV4RotaryEmbedding(hf)
    positions = torch.arange(hf.max_position_embeddings)[None]
    half = ours.qk_rope_head_dim // 2
    for entry in ENTRIES:
        cos, sin = layer(torch.zeros(1), positions, layer_type=entry)
        scale = getattr(layer, f"{entry}_attention_scaling")
        for kind in KINDS[entry]:
            table = build_cos_sin(ours, kind)
            torch.testing.assert_close(table, torch.cat([cos[0], sin[0]], dim=1), rtol=0, atol=1e-6)
            torch.testing.assert_close(table[0, :half], torch.full((half,), scale), rtol=0, atol=1e-6)
            frequencies = torch.atan2(table[1, half:], table[1, :half])  # the angle at position 1, below pi
            torch.testing.assert_close(frequencies, getattr(layer, f"{entry}_inv_freq"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_tables_are_those_of_transformers(entry: str, name: str, shape: tuple[int, float, int]) -> None:
    hf = hf_config(shape, **{"main": {}, "compress": {}, entry: SCALINGS[name]})
    ours = DeepseekV4Config.from_hf(hf)
    assert ours.qk_rope_head_dim == int(shape[0] * shape[1])
    assert (ours.rope_theta, ours.compress_rope_theta) == (500.0, 70000.0)
    assert_tables_equal(hf, ours)


@pytest.mark.parametrize("name", SCALINGS)
def test_both_entries_may_scale_and_a_file_says_the_same(tmp_path: Path, name: str) -> None:
    hf = hf_config(SHAPES[0], SCALINGS[name], {**YARN, "factor": 7.0})
    ours = DeepseekV4Config.from_hf(hf)
    assert_tables_equal(hf, ours)
    hf.save_pretrained(tmp_path)
    assert DeepseekV4Config.from_hf(tmp_path) == DeepseekV4Config.from_hf(hf.to_dict()) == ours


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "yarn, truncate"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_a_flat_dict_scales_the_compressed_layers_only(field: str, name: str, shape: tuple[int, float, int]) -> None:
    values = {"rope_parameters": None, field: copy.deepcopy(SCALINGS[name]), "partial_rotary_factor": shape[1]}
    hf = hf_config(shape, {}, {}, **values)
    written = {**hf.to_dict(), "rope_parameters": None, field: SCALINGS[name]}
    for ours in (DeepseekV4Config.from_hf(hf), DeepseekV4Config.from_hf(written)):
        assert ours.main_rope_scaling is None
        assert_tables_equal(hf, ours)


def test_yarn_has_no_attention_factor_in_the_released_layout_but_in_the_nested_one() -> None:
    flat = DeepseekV4Config.from_hf(RELEASED).rope_scaling
    assert isinstance(flat, YarnScaling)
    assert flat.attention_factor == 1.0
    nested = DeepseekV4Config.from_hf(hf_config(SHAPES[0], {}, YARN)).rope_scaling
    assert isinstance(nested, YarnScaling)
    assert nested.attention_factor == pytest.approx(1.2772588722)  # 0.1 * ln(16) + 1


@pytest.mark.parametrize("theta", [None, 77.0])
def test_an_entry_of_a_file_may_leave_out_what_stands_beside_it(theta: float | None) -> None:
    values = {name: value for name, value in RELEASED.items() if name not in ("rope_scaling", "qk_rope_head_dim")}
    main = {} if theta is None else {"rope_theta": theta}
    parameters = {"main": main, "compress": {"rope_theta": 700.0, "rope_type": "linear", "factor": 2}}
    ours = DeepseekV4Config.from_hf({**values, "partial_rotary_factor": 0.25, "rope_parameters": parameters})
    assert (ours.rope_theta, ours.compress_rope_theta) == (theta or 10000, 700.0)
    assert (ours.qk_rope_head_dim, ours.rope_scaling) == (128, LinearScaling(factor=2))


def test_what_stands_beside_two_entries_is_not_theirs() -> None:
    # a leftover that transformers may write, and drops when it reads
    hf = hf_config(SHAPES[0], {}, {})
    written = hf.to_dict()
    written["rope_parameters"] |= {"rope_type": "yarn", "factor": 9.0}
    assert DeepseekV4Config.from_hf(written) == DeepseekV4Config.from_hf(hf)


def test_rope_scaling_goes_before_rope_parameters() -> None:
    entries = {"main": {"rope_theta": 5.0}, "compress": {"rope_theta": 6.0}}
    assert DeepseekV4Config.from_hf(RELEASED | {"rope_parameters": entries}) == DeepseekV4Config.flash()


BUILT = ("default", "linear", "yarn")
NAMED = ("dynamic", "longrope", "llama3", "proportional", "axial", "su", "Yarn")
OTHERS = sorted({*ROPE_INIT_FUNCTIONS, *NAMED} - set(BUILT))  # and what another version of transformers adds


@pytest.mark.parametrize("rope_type", [*OTHERS, None, 3, ["yarn"]], ids=str)
@pytest.mark.parametrize("entry", ["main", "compress", None])
def test_other_types_are_refused_by_name(rope_type: Any, entry: str | None) -> None:
    where = f"rope_parameters[{entry!r}]" if entry else "rope_parameters"
    message = f"{where} asks for RoPE of type {rope_type!r}, which is not built; supported are default, linear, yarn"
    with pytest.raises(UnsupportedConfigError, match=f"^{re.escape(message)}$"):
        read(entry, {"rope_type": rope_type, "factor": 2.0})


def read(entry: str | None, changes: dict[str, Any]) -> DeepseekV4Config:
    """The configuration with one entry changed, or the released one with a flat dict."""
    if entry is None:
        return DeepseekV4Config.from_hf(RELEASED | {"rope_scaling": None, "rope_parameters": changes})
    values = hf_config(SHAPES[0], {}, {}).to_dict()
    values["rope_parameters"][entry] = {**values["rope_parameters"][entry], **changes}
    return DeepseekV4Config.from_hf(values)


LEAVE_OUT = "leave it out, or name the type that it belongs to"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 4.0}, f"{{}} has factor, which RoPE of type 'default' does not use; {LEAVE_OUT}"),
        (
            {"rope_type": "linear", "factor": 4.0, "attention_factor": 1.0, "beta_fast": 3},
            f"{{}} has attention_factor, beta_fast, which RoPE of type 'linear' does not use; {LEAVE_OUT}",
        ),
        (YARN | {"short_factor": [1.0]}, f"{{}} has short_factor, which RoPE of type 'yarn' does not use; {LEAVE_OUT}"),
        (
            YARN | {"truncate": False},
            "{} has truncate False, which transformers does not read for this model; YaRN is built with truncate True",
        ),
        ({"rope_type": "yarn", "beta_fast": 32}, "{} lacks factor, which YaRN needs"),
        ({"rope_type": "linear"}, "factor of {} is None; it must be a number above 0"),
        ({"rope_type": "linear", "factor": 0}, "factor of {} is 0; it must be a number above 0"),
        (YARN | {"factor": "16"}, "factor of {} is '16'; it must be a number above 0"),
        (YARN | {"factor": float("nan")}, "factor of {} is nan; it must be a number above 0"),
        (YARN | {"beta_slow": -1}, "beta_slow of {} is -1; it must be a number above 0"),
        (YARN | {"beta_fast": True}, "beta_fast of {} is True; it must be a number above 0"),
        (YARN | {"attention_factor": 0}, "attention_factor of {} is 0; it must be a number above 0"),
        (YARN | {"mscale": "1", "mscale_all_dim": 1}, "mscale of {} is '1'; it must be a number above 0"),
        (
            YARN | {"original_max_position_embeddings": 64.5},
            "original_max_position_embeddings of {} is 64.5; it must be an integer above 0",
        ),
    ],
)
@pytest.mark.parametrize("entry", ["main", "compress", None])
def test_what_is_not_built_is_refused_by_name(entry: str | None, changes: dict[str, Any], message: str) -> None:
    where = f"rope_parameters[{entry!r}]" if entry else "rope_parameters"
    with pytest.raises(UnsupportedConfigError, match=f"^{re.escape(message.format(where))}$"):
        read(entry, changes)


PLAIN = {"rope_theta": 5.0, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"main": PLAIN},
            "rope_parameters has only an entry 'main', which transformers ignores then; give it both main and compress",
        ),
        (
            {"main": None, "compress": PLAIN},
            "rope_parameters has only an entry 'compress', which transformers ignores then; "
            "give it both main and compress",
        ),
        ({"main": 3, "compress": PLAIN}, "rope_parameters['main'] is 3; it must be a dict"),
        ({"main": PLAIN, "compress": [1]}, "rope_parameters['compress'] is [1]; it must be a dict"),
        (
            {"main": PLAIN, "compress": {"partial_rotary_factor": 0.25}},
            "rope_parameters['compress'] lacks rope_theta: transformers takes the one of the sliding-window layers "
            "then; write it out",
        ),
        (
            {"main": PLAIN | {"partial_rotary_factor": 0.5}, "compress": PLAIN},
            "rope_parameters['main'] rotates 256 dims and rope_parameters['compress'] 128; "
            "one partial_rotary_factor for both is supported",
        ),
        (
            {"main": {"rope_theta": 5.0}, "compress": PLAIN},
            "rope_parameters['main'] lacks partial_rotary_factor: until the configuration is saved and read again, "
            "transformers rotates the whole head then; write it out",
        ),
        (
            {"main": PLAIN, "compress": PLAIN | {"partial_rotary_factor": "0.25"}},
            "partial_rotary_factor of rope_parameters['compress'] is '0.25'; it must be a number above 0",
        ),
        (
            {"main": PLAIN | {"rope_theta": "5"}, "compress": PLAIN},
            "rope_theta is '5'; it must be a number above 0",
        ),
    ],
)
def test_entries_that_do_not_say_what_to_build_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"^{re.escape(message)}$"):
        DeepseekV4Config.from_hf(RELEASED | {"rope_scaling": None, "rope_parameters": parameters})


def test_an_object_whose_entries_are_not_complete_is_refused() -> None:
    # transformers' layer rotates all of the head here, and a quarter of it after a save
    entries = {"main": {"rope_type": "default", "rope_theta": 5.0}, "compress": dict(PLAIN)}
    hf = tiny_hf_config(rope_parameters=entries)
    assert hf.partial_rotary_factor == 0.25
    assert DeepseekV4RotaryEmbedding(hf).main_inv_freq.numel() == hf.head_dim // 2
    with pytest.raises(UnsupportedConfigError, match=r"^rope_parameters\['main'\] lacks partial_rotary_factor: until"):
        DeepseekV4Config.from_hf(hf)


def test_two_widths_that_differ_are_refused() -> None:
    message = "qk_rope_head_dim is 64, but partial_rotary_factor 0.25 makes it 128; leave one of the two out"
    with pytest.raises(UnsupportedConfigError, match=f"^{message}$"):
        DeepseekV4Config.from_hf(RELEASED | {"partial_rotary_factor": 0.25})


@pytest.mark.parametrize("name", ["rope_scaling", "main_rope_scaling"])
def test_a_scaling_of_our_own_configuration_is_a_record(name: str) -> None:
    message = f"{name} is {{'factor': 2}}; it must be a LinearScaling, a YarnScaling or None"
    with pytest.raises(UnsupportedConfigError, match=f"^{re.escape(message)}$"):
        DeepseekV4Config.flash(**{name: {"factor": 2}})
    with pytest.raises(UnsupportedConfigError, match=r"^factor is 0; it must be a number above 0$"):
        DeepseekV4Config.flash(**{name: LinearScaling(factor=0)})
