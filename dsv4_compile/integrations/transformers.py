"""Our attention in a Hugging Face DeepSeek V4: the same weights, served paged and in ragged batches.

`swap_attention` doesn't change what the given model computes. It makes a second module tree that differs in the
attention layers only and shares every weight, so the original still generates and saves. Our layers fuse two pairs of
projections: the fused parameter is the storage, and the original parameters become views of it.

The step state travels as a keyword argument through transformers' own forward, so that a compiler sees its tensors
as graph inputs. transformers' mask and cache are switched off: causality is in the step state, history in the paged
caches. To compile without graph breaks choose `experts_implementation="grouped_mm"` (transformers' default) or
"batched_mm"; "eager" looks at the routing on the host.

A checkpoint's MTP block, which transformers ignores, is loaded with `mtp=True` (see transformers_mtp.py). The swapped
model then has it as `drafter`, and returns the residual streams it drafts from beside the logits.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, DeepseekV4ForCausalLM, PretrainedConfig

from ..errors import UnsupportedConfigError
from ..models.deepseek_v4.attention import DeepseekV4Attention
from ..models.deepseek_v4.checks import Values
from ..models.deepseek_v4.compressor import Compressor
from ..models.deepseek_v4.config import DeepseekV4Config, LayerKind, config_values
from ..models.deepseek_v4.indexer import Indexer
from ..models.deepseek_v4.mtp import MTPBlock
from ..models.deepseek_v4.shared import SharedBuffers
from ..models.deepseek_v4.step import StepState
from .sharding import Plan, group_of, is_sharding_hook, refusing_of_shards, sharding_arguments, whole
from .transformers_mtp import WithMTP, check_mtp_config, check_mtp_loaded, mtp_block

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Module = TypeVar("Module", bound=nn.Module)
Theirs: TypeAlias = Any  # a module of transformers, whose attributes have no types for us

# transformers takes masks that are made already from such a dict: this one says there is none to make
_NO_MASK = {"sliding_attention": None}


class SwappedAttention(nn.Module):
    """`DeepseekV4Attention` where transformers calls its own attention layer: a batch of one flat sequence."""

    def __init__(self, attention: DeepseekV4Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, hidden_states: Tensor, *, position_ids: Tensor, step: StepState, **unused: object
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] to ([1, T, hidden], None); transformers' mask, cache and rotary tables are not read."""
        attended = self.attention(hidden_states.squeeze(0), position_ids.squeeze(0), step)
        return attended.unsqueeze(0), None


class SwappedModel(nn.Module):
    """A Hugging Face model with our attention, callable as the runners call models.

    Attributes:
        config: sizes of the attention layers; what a runner needs.
        language_model: the `DeepseekV4ForCausalLM` with swapped layers.
        drafter: None; see `SwappedModelWithMTP`.
        process_group: the ranks that it is spread over, which the runners keep in step; None for a whole model.
    """

    drafter: MTPBlock | None

    def __init__(
        self, language_model: nn.Module, config: DeepseekV4Config, process_group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.config = config
        self.language_model = language_model
        self.drafter = None

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        """Logits [T, vocab] of input_ids [T] int64 at positions [T] int64."""
        output = self.language_model(**_arguments(input_ids, positions, step))
        logits: Tensor = output.logits
        return logits.squeeze(0)


class SwappedModelWithMTP(SwappedModel):
    """A `SwappedModel` whose MTP block drafts for it.

    Attributes:
        language_model: as there, but that the streams are not made one: this class does so with `head` and `norm`.
        drafter: the block, on the model's embedding and language-model head.
    """

    drafter: MTPBlock

    def __init__(
        self,
        language_model: Theirs,
        config: DeepseekV4Config,
        drafter: MTPBlock,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(language_model, config, process_group)
        inner = language_model.model = _copy_module(language_model.model)
        self.head, self.norm, self.lm_head = inner.hc_head, inner.norm, language_model.lm_head
        inner.hc_head, inner.norm = nn.Identity(), nn.Identity()
        self.drafter = drafter

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Logits [T, vocab] and streams [T, n, hidden] of input_ids [T] int64 at positions [T] int64."""
        inner: Theirs = self.language_model.model
        output = inner(**_arguments(input_ids, positions, step))
        streams: Tensor = output.last_hidden_state
        logits: Tensor = self.lm_head(self.norm(self.head(streams)))
        return logits.squeeze(0), streams.squeeze(0)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    experts_implementation: str | None = None,
    mtp: bool = False,
    tp_plan: Plan | None = None,
    distributed_config: object = None,
    **overrides: object,
) -> SwappedModel:
    """Load a checkpoint folder through transformers and swap the attention.

    Args:
        path, dtype, device, experts_implementation, mtp, tp_plan, distributed_config: as in `load_original`.
        overrides: fields of our `DeepseekV4Config`, for example `max_position_embeddings` for shorter RoPE tables.

    Raises:
        FileNotFoundError, UnsupportedConfigError: as in `load_original` and `swap_attention`.
    """
    DeepseekV4Config.from_hf(_read_config(Path(path)), **overrides)  # before the weights, which may take minutes
    model = load_original(
        path,
        dtype=dtype,
        device=device,
        experts_implementation=experts_implementation,
        mtp=mtp,
        tp_plan=tp_plan,
        distributed_config=distributed_config,
    )
    return swap_attention(model, **overrides)


def load_original(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    experts_implementation: str | None = None,
    mtp: bool = False,
    tp_plan: Plan | None = None,
    distributed_config: object = None,
) -> DeepseekV4ForCausalLM:
    """Load a checkpoint folder as transformers does, but without its silent repairs.

    Names and configuration may be those of `save_pretrained` or those of the released checkpoints. Quantised weights
    are dequantised (transformers needs the package accelerate for that).

    Args:
        path: folder with config.json and safetensors.
        dtype: of the weights; None: as the checkpoint says.
        device: where the model goes; None: the CPU, or where transformers puts the part of this rank.
        experts_implementation: transformers' option of that name; None: its default.
        mtp: load the checkpoint's MTP block too; `swap_attention` makes a drafter of it.
        tp_plan, distributed_config: transformers' options of these names, for a process that `torchrun` has started
            (see `sharding.py`); the package accelerate is needed.

    Raises:
        FileNotFoundError: no such folder, or it has no config.json.
        UnsupportedConfigError: another architecture, a configuration or kind of parallelism we cannot serve, or weights
            that are missing or have other sizes than the configuration says; with `mtp`, those of its MTP block too.
    """
    sharding = sharding_arguments(tp_plan, distributed_config)
    folder = Path(path)
    values = _read_config(folder)
    num_layers = DeepseekV4Config.from_hf(values).num_hidden_layers
    if mtp:
        check_mtp_config(folder / "config.json", values, num_layers)
    config = _config_of_transformers(folder)
    if isinstance(quantisation := getattr(config, "quantization_config", None), Mapping):
        config.quantization_config = {**quantisation, "dequantize": True}
    if experts_implementation is not None:
        config._experts_implementation = experts_implementation
    with refusing_of_shards(folder, sharding):
        model, report = (WithMTP if mtp else DeepseekV4ForCausalLM).from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported then, and refused below
            **sharding,
        )
    if mtp:
        check_mtp_loaded(folder, report["missing_keys"], model.state_dict())
    _check_loaded(folder, report)
    if group_of(model) is None:
        return model.to(device)
    if device is not None and torch.device(device).type != model.lm_head.weight.device.type:
        raise UnsupportedConfigError(
            f"device is {device}, but transformers has put this rank's part on {model.lm_head.weight.device}"
        )
    return model


def swap_attention(model: nn.Module, **overrides: object) -> SwappedModel:
    """Put our attention layers into a copy of the model's module tree that shares all weights.

    Cast and move the model before: afterwards a cast would make copies of the fused weights.

    Args:
        model: a `DeepseekV4ForCausalLM` on one device.
        overrides: fields of our `DeepseekV4Config`.

    Returns:
        A model for the runners, a `SwappedModelWithMTP` if the model was loaded with its MTP block; `model` itself
        works on as before, on the same storage.

    Raises:
        UnsupportedConfigError: another architecture, quantised or offloaded weights, or a configuration we cannot
            serve.
    """
    if not isinstance(model, DeepseekV4ForCausalLM):
        raise UnsupportedConfigError(f"swap_attention takes a DeepseekV4ForCausalLM, not a {type(model).__name__}")
    config = DeepseekV4Config.from_hf(model.config, **overrides)
    if isinstance(model, WithMTP):
        ratios = config.compress_ratios[: config.num_hidden_layers]
        config = replace(config, compress_ratios=(*ratios, LayerKind.SWA.value))
    _check_plain(model)
    shared = SharedBuffers(config, device=model.lm_head.weight.device)
    swapped = _copy_module(model)
    swapped.model = _copy_module(model.model)
    swapped.model.layers = nn.ModuleList(_swap_layer(layer, config, shared) for layer in model.model.layers)
    if not isinstance(model, WithMTP):
        return SwappedModel(swapped, config, group_of(model))
    del swapped.mtp  # it is there as what it drafts with
    drafter = mtp_block(model, _swap_layer(model.mtp[0], config, shared))
    return SwappedModelWithMTP(swapped, config, drafter, group_of(model))


def _arguments(input_ids: Tensor, positions: Tensor, step: StepState) -> dict[str, Any]:
    """What transformers is called with: a batch of one flat sequence, without mask and cache."""
    return {
        "input_ids": input_ids.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "attention_mask": _NO_MASK,
        "use_cache": False,
        "step": step,
    }


def _read_config(folder: Path) -> Values:
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint folder at {folder}")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is no checkpoint folder")
    config = config_values(file)
    if config.get("model_type") != "deepseek_v4":
        raise UnsupportedConfigError(
            f"{file} has model_type {config.get('model_type')!r}; only 'deepseek_v4' is served"
        )
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise UnsupportedConfigError(f"{file} has dtype {dtype!r}, which torch does not have; try 'bfloat16'")
    return config


def _config_of_transformers(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except StrictDataclassError as error:
        raise UnsupportedConfigError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from error


def _check_loaded(folder: Path, report: Mapping[str, Iterable[Any]]) -> None:
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedConfigError(
            f"{folder}: the checkpoint lacks {len(missing)} weights, for example {missing[0]}; is a file missing?"
        )
    if differing := sorted(report["mismatched_keys"]):
        name, stored, expected = differing[0]
        raise UnsupportedConfigError(
            f"{folder}: {len(differing)} weights have other sizes than config.json says, for example {name} "
            f"{list(stored)} and not {list(expected)}; do the two belong together?"
        )


def _check_plain(model: nn.Module) -> None:
    """Refuse modules whose forward belongs to the original object, and weights that are not plain and in one place."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise UnsupportedConfigError(f"the model is spread over {sorted(map(str, devices))}; load it to one device")
    for name, module in model.named_modules():
        is_attention = ".self_attn" in name
        if "forward" in vars(module) and (is_attention or not is_sharding_hook(module)):
            cure = "leave attention out of the plan" if is_sharding_hook(module) else "load without device_map"
            raise UnsupportedConfigError(f"{name or 'the model'} has hooks around its forward; {cure}")
        if is_attention and hasattr(module, "weight_scale_inv"):
            raise UnsupportedConfigError(f"{name} is quantised; load with dequantize=True in the quantization_config")


def _copy_module(module: Module) -> Module:
    """The same parameters and buffers in a new module with the same children, which can then be replaced."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def _swap_layer(layer: nn.Module, config: DeepseekV4Config, shared: SharedBuffers) -> nn.Module:
    swapped = _copy_module(layer)
    theirs: Theirs = layer.self_attn
    for name, parameter in list(theirs.named_parameters()):
        if (plain := whole(parameter, f"self_attn.{name}")) is not parameter:
            owner, _, attribute = name.rpartition(".")
            setattr(theirs.get_submodule(owner), attribute, plain)
    with torch.device("meta"):
        attention = DeepseekV4Attention(config, theirs.layer_idx, shared)
    _share_attention(attention, theirs)
    swapped.self_attn = SwappedAttention(attention)
    return swapped


def _share_attention(ours: DeepseekV4Attention, theirs: Theirs) -> None:
    ours.fused_wqa_wkv.weight = _fuse(theirs.q_a_proj.weight, theirs.kv_proj.weight)
    ours.q_norm = theirs.q_a_norm.weight
    ours.kv_norm = theirs.kv_norm.weight
    ours.wq_b.weight = theirs.q_b_proj.weight
    ours.attn_sink = theirs.sinks
    ours.wo_a.weight = theirs.o_a_proj.weight
    ours.wo_b.weight = theirs.o_b_proj.weight
    if ours.compressor is not None:
        _share_compressor(ours.compressor, theirs.compressor)
    if ours.indexer is not None:
        _share_indexer(ours.indexer, theirs.compressor.indexer)


def _share_compressor(ours: Compressor, theirs: Theirs) -> None:
    ours.fused_wkv_wgate.weight = _fuse(theirs.kv_proj.weight, theirs.gate_proj.weight)
    ours.ape = theirs.position_bias
    ours.norm = theirs.kv_norm.weight


def _share_indexer(ours: Indexer, theirs: Theirs) -> None:
    ours.wq_b.weight = theirs.q_b_proj.weight
    ours.weights_proj.weight = theirs.scorer.weights_proj.weight
    _share_compressor(ours.compressor, theirs)


def _fuse(first: nn.Parameter, second: nn.Parameter) -> nn.Parameter:
    """One parameter with the rows of both, which become views of it; where they are already, nothing moves."""
    if first.dtype != second.dtype:
        raise UnsupportedConfigError(f"weights to be fused have the dtypes {first.dtype} and {second.dtype}")
    split = len(first)
    if not _are_adjacent(first, second):
        both = torch.cat([first.data, second.data])
        first.data, second.data = both[:split], both[split:]
    rows = first.data.as_strided((split + len(second), first.shape[1]), (first.shape[1], 1))
    return nn.Parameter(rows, requires_grad=first.requires_grad)


def _are_adjacent(first: Tensor, second: Tensor) -> bool:
    same_storage = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return (
        same_storage
        and first.is_contiguous()
        and second.is_contiguous()
        and second.storage_offset() == first.storage_offset() + first.numel()
    )
