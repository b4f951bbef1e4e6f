"""The configuration: presets as released, both layouts of config.json, and refusals that name what is supported."""

import json
import re
from functools import partial

import pytest
import torch
from released_configs import RELEASED, YARN
from transformers.models.deepseek_v4 import DeepseekV4Config as HfConfig

from dsv4_compile.errors import UnsupportedConfigError
from dsv4_compile.models.deepseek_v4 import DeepseekV4Config, LayerKind, YarnScaling


def counts(config):
    kinds = [config.kind(i) for i in range(config.num_hidden_layers)]
    return [kinds.count(kind) for kind in (LayerKind.SWA, LayerKind.C4A, LayerKind.C128A)]


def test_flash_is_the_released_flash():
    config = DeepseekV4Config.flash()
    assert config == DeepseekV4Config.from_hf(RELEASED)
    assert counts(config) == [2, 21, 20]
    assert len(config.compress_ratios) == 44


def test_pro_is_the_released_pro():
    changes = {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    }
    config = DeepseekV4Config.pro()
    assert config == DeepseekV4Config.from_hf(RELEASED | changes)
    assert counts(config) == [0, 30, 31]
    assert config.kind(61) is LayerKind.SWA  # the MTP layer


def test_presets_take_overrides():
    config = DeepseekV4Config.flash(max_position_embeddings=4096, kv_cache_dtype="bfloat16")
    assert config.max_position_embeddings == 4096
    assert config.cache_dtype(torch.float32) is torch.bfloat16
    assert DeepseekV4Config.flash().cache_dtype(torch.float32) is torch.float32


def test_tiny_has_a_layer_for_each_ratio():
    config = DeepseekV4Config.tiny([0, 4, 4, 128], vocab_size=7)
    assert [config.kind(i).value for i in range(config.num_hidden_layers)] == [0, 4, 4, 128]
    assert (config.vocab_size, config.rope_scaling) == (7, None)


def hf_config():
    # from the released layout, through transformers
    return HfConfig(**{k: v for k, v in RELEASED.items() if k not in ("model_type", "quantization_config")})


def test_a_configuration_object_of_transformers():
    config = DeepseekV4Config.from_hf(hf_config(), max_num_batched_tokens=77)
    assert counts(config) == [2, 21, 20]
    # transformers drops the entry of the MTP layer
    expected = DeepseekV4Config.flash(
        compress_ratios=tuple(RELEASED["compress_ratios"][:43]), max_num_batched_tokens=77
    )
    assert config == expected


@pytest.mark.parametrize("as_folder", [True, False])
def test_what_save_pretrained_wrote(tmp_path, as_folder):
    hf_config().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in written
    assert "compress" in written["rope_parameters"]
    config = DeepseekV4Config.from_hf(tmp_path if as_folder else str(tmp_path / "config.json"))
    assert config == DeepseekV4Config.flash(compress_ratios=tuple(RELEASED["compress_ratios"][:43]))


def test_the_released_layout_from_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert DeepseekV4Config.from_hf(tmp_path) == DeepseekV4Config.flash()


def test_rope_without_yarn():
    released = RELEASED | {"rope_scaling": None}
    assert DeepseekV4Config.from_hf(released).rope_scaling is None
    nested = hf_config().to_dict()
    nested["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": 500.0},
        "compress": {"rope_type": "default", "rope_theta": 700.0},
    }
    config = DeepseekV4Config.from_hf(nested)
    assert (config.rope_theta, config.compress_rope_theta, config.rope_scaling) == (500.0, 700.0, None)


def test_yarn_values_are_read():
    scaling = YARN | {"factor": 4, "beta_fast": 20, "original_max_position_embeddings": 512}
    expected = YarnScaling(factor=4, beta_fast=20, beta_slow=1, original_max_position_embeddings=512)
    assert DeepseekV4Config.from_hf(RELEASED | {"rope_scaling": scaling}).rope_scaling == expected


def test_the_rope_width_as_a_fraction():
    values = {k: v for k, v in RELEASED.items() if k != "qk_rope_head_dim"} | {"partial_rotary_factor": 0.125}
    assert DeepseekV4Config.from_hf(values).qk_rope_head_dim == 64


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_cache_dtype", "fp8", "'fp8' is not supported: did you mean 'fp8_ds_mla'?"),
        ("kv_cache_dtype", "mxfp4", "'mxfp4' is not supported."),
        ("kv_cache_dtype", "float16", "'float16' is not supported: did you mean 'float32'?"),
        ("kv_cache_dtype", torch.uint8, "torch.uint8 is not supported."),
        ("kv_cache_dtype", None, "None is not supported."),
        ("kv_cache_dtype", ["bf16"], "['bf16'] is not supported."),
        ("kv_cache_dtype", "", "'' is not supported."),
        ("index_cache_dtype", "mxpf4", "'mxpf4' is not supported: did you mean 'mxfp4'?"),
        ("index_cache_dtype", "fp8_ds_mla", "'fp8_ds_mla' is not supported."),
        ("index_cache_dtype", torch.float8_e4m3fn, "torch.float8_e4m3fn is not supported."),
    ],
)
def test_a_cache_format_that_is_not_built_is_refused(field, value, message):
    known = {
        "kv_cache_dtype": "auto, float32, bf16, fp8_ds_mla",
        "index_cache_dtype": "auto, float32, bf16, fp8, mxfp4",
    }
    with pytest.raises(
        UnsupportedConfigError, match=f"^{re.escape(f'{field} {message} Supported are {known[field]}')}$"
    ):
        DeepseekV4Config.flash(**{field: value})


@pytest.mark.parametrize("word", ["bf16", "bfloat16", torch.bfloat16])
def test_a_dtype_may_be_a_word_or_one_of_torch(word):
    config = DeepseekV4Config.flash(kv_cache_dtype=word, index_cache_dtype=torch.float32)
    assert (config.kv_cache_dtype, config.index_cache_dtype) == ("bf16", "float32")
    assert config == config.with_cache_dtypes("bf16", None)
    assert (config.kv_dtype, config.index_dtype) == (torch.bfloat16, torch.float32)


def test_index_keys_follow_the_kv_cache_unless_that_is_packed():
    def dtypes(**words):
        config = DeepseekV4Config.flash(**words)
        return config.kv_dtype, config.index_dtype

    assert dtypes() == (None, None)
    assert dtypes(kv_cache_dtype="bf16") == (torch.bfloat16, torch.bfloat16)
    assert dtypes(kv_cache_dtype="fp8_ds_mla") == (torch.uint8, None)
    assert dtypes(index_cache_dtype="fp8") == (None, torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "fp8_ds_mla", "head_dim": 511}, "'fp8_ds_mla' needs an even head_dim, not 511"),
        ({"index_cache_dtype": "mxfp4", "index_head_dim": 127}, "'mxfp4' needs an even index_head_dim, not 127"),
        (
            {
                "index_cache_dtype": "fp8",
                "index_head_dim": 127,
                "compressed_block_size": 8,
                "compress_ratios": [4] * 43,
            },
            "'fp8' needs 2 rows of index_head_dim 127 to be a multiple of 4 bytes",
        ),
    ],
)
def test_sizes_that_cannot_be_packed_are_refused(changes, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        DeepseekV4Config.flash(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 8] * 22}, r"layer 1 has compression ratio 8; supported are \[0, 4, 128\]"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 43 layers"),
        ({"compress_ratios": None}, "neither compress_ratios nor layer_types"),
        ({"compress_ratios": None, "layer_types": ["full_attention"]}, "layer_types has full_attention; supported are"),
        ({"o_groups": 7}, "num_attention_heads 64 is not a multiple of o_groups 7"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 must be even and at most head_dim 512"),
        ({"index_head_dim": 32}, "qk_rope_head_dim 64 must be even .* and index_head_dim 32"),
        ({"qk_rope_head_dim": None}, "neither qk_rope_head_dim nor partial_rotary_factor"),
        (
            {"hidden_size": None, "index_topk": None},
            "the configuration lacks hidden_size, index_topk; pass them as key",
        ),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        DeepseekV4Config.from_hf(RELEASED | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "a"}, "num_hidden_layers is 'a'; it must be an integer above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer above 0"),
        ({"hidden_size": 4096.5}, r"hidden_size is 4096\.5; it must be an integer above 0"),
        ({"vocab_size": True}, "vocab_size is True; it must be an integer above 0"),
        ({"o_groups": 0}, "o_groups is 0; it must be an integer above 0"),
        ({"sliding_window": -1}, "sliding_window is -1; it must be an integer above 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; it must be a number above 0"),
        ({"head_dim": "512", "qk_rope_head_dim": None, "partial_rotary_factor": 0.1}, "head_dim is '512'; it must be"),
        ({"compress_ratios": 4}, "compress_ratios is 4; it must be a list"),
        ({"compress_ratios": ["4"] * 44}, r"layer 0 has compression ratio '4'; supported are \[0, 4, 128\]"),
        ({"compress_ratios": [[4]] * 44}, r"layer 0 has compression ratio \[4\]; supported"),
        ({"compress_ratios": None, "layer_types": "all"}, "layer_types is 'all'; it must be a list"),
        ({"compress_ratios": None, "layer_types": [1, 1]}, "layer_types has 1; supported are"),
        ({"compress_ratios": None, "layer_types": [{}]}, r"layer_types has \{\}; supported are"),
        ({"head_dim": None, "qk_rope_head_dim": None, "partial_rotary_factor": 0.1}, "lacks head_dim; pass"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be a dict"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        DeepseekV4Config.from_hf(RELEASED | changes)


def test_a_missing_field_may_come_as_a_keyword():
    released = {k: v for k, v in RELEASED.items() if k != "index_topk"}
    assert DeepseekV4Config.from_hf(released, index_topk=512) == DeepseekV4Config.flash()


def test_a_block_must_hold_whole_compressed_rows():
    with pytest.raises(UnsupportedConfigError, match="compressed_block_size 64 is not a multiple of the ratio 128"):
        DeepseekV4Config.flash(compressed_block_size=64)


def test_it_is_frozen():
    with pytest.raises(AttributeError, match="cannot assign to field 'head_dim'"):
        DeepseekV4Config.flash().head_dim = 1


@pytest.mark.parametrize("text", ["[]", "3", "null", '"deepseek_v4"'])
def test_a_file_that_holds_no_dict_is_refused_by_its_path(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    message = re.escape(f"{tmp_path / 'config.json'} holds {json.loads(text)!r}; it must be a dict")
    for path in (tmp_path, str(tmp_path / "config.json")):
        with pytest.raises(UnsupportedConfigError, match=f"^{message}$"):
            DeepseekV4Config.from_hf(path)


@pytest.mark.parametrize(
    "thing", [5, None, [("head_dim", 512)], DeepseekV4Config.tiny([0])], ids=lambda t: type(t).__name__
)
def test_what_is_no_configuration_is_refused(thing):
    with pytest.raises(
        UnsupportedConfigError, match=r" is no configuration: give a dict, a path or a configuration of"
    ):
        DeepseekV4Config.from_hf(thing)


@pytest.mark.parametrize(
    "make",
    [
        DeepseekV4Config.flash,
        DeepseekV4Config.pro,
        partial(DeepseekV4Config.tiny, [0]),
        partial(DeepseekV4Config.from_hf, RELEASED),
    ],
)
def test_an_override_must_name_a_field(make):
    message = r"^DeepseekV4Config has no field 'zzz'\. Valid: hidden_size, num_hidden_layers, .*c128_state_block_si"
    with pytest.raises(UnsupportedConfigError, match=message):
        make(zzz=3)
    with pytest.raises(
        UnsupportedConfigError, match=r"no field 'slide_window': did you mean 'sliding_window'\? Valid: "
    ):
        make(slide_window=3)
