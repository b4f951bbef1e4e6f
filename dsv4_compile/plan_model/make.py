"""From a configuration to a `ModelPlan`: trace once, place slots for each token count, measure an engine, add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..config import Config, runner_reason
from ..errors import UnsupportedConfigError
from ..graph.partitioned import InputRole, PartitionedGraph
from ..models.deepseek_v4 import DeepseekV4Config, bytes_per_token, layer_cache_specs
from ..runners.batch import block_groups
from ..runners.limits import RunnerLimits
from .fake_stack import FakeStack, read_stack
from .figures import BucketEstimate, BucketMemory, CacheRoom, DeviceRoom, EngineFigures, ModelPlan, StepLaunches
from .measure_engine import measure_host_engine
from .memory import bucket_memory

# as README.md has them
CACHE_FORMATS = (("bf16", "bf16"), ("fp8_ds_mla", "fp8"), ("fp8_ds_mla", "mxfp4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        model: what the answer calls the model.
        config: of it.
        tokens: token counts that are captured, ascending.
        options: of the backend.
        dtype: of the model.
        weights_dtype: in which its weights are counted.
        parameters: on the GPU; None: those of the attention stack.
        requests: that run at once.
        gpu_memory: bytes of the GPU.
        launch_us: microseconds of host time of a launch.
    """

    model: str
    config: DeepseekV4Config
    tokens: Sequence[int]
    options: Config
    dtype: torch.dtype
    weights_dtype: torch.dtype
    parameters: int | None
    requests: int
    gpu_memory: int
    launch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What the plan alone says."""

    parameters: int
    buffers: int
    launches: StepLaunches
    buckets: tuple[BucketMemory, ...]
    notes: tuple[str, ...]


def plan_model(question: Question) -> ModelPlan:
    """Answer it.

    Raises:
        HazardError: the region is too narrow for the runner.
    """
    # a step of so many tokens needs as many rows of the buffer of selected blocks
    rows = max(question.config.max_num_batched_tokens, *question.tokens)
    question = replace(question, config=replace(question.config, max_num_batched_tokens=rows))
    config = question.config

    def read(stack: FakeStack, graph: PartitionedGraph) -> _Planned:
        return _Planned(
            parameters=stack.parameters,
            buffers=stack.buffers,
            launches=step_launches(graph),
            buckets=tuple(bucket_memory(graph, config, tokens) for tokens in question.tokens),
            notes=(*graph.notes, *([] if graph.uncaptured is None else [f"calls run uncaptured: {graph.uncaptured}"])),
        )

    planned = read_stack(config, question.dtype, question.requests, question.options, read)
    engine = measure_host_engine(config)
    estimates = tuple(estimate_capture(engine, planned.launches, bucket) for bucket in planned.buckets)
    return ModelPlan(
        model=question.model,
        layers=config.num_hidden_layers,
        parameters=planned.parameters,
        dtype=_word(question.dtype),
        weights_dtype=_word(question.weights_dtype),
        requests=question.requests,
        runner=question.options.resolved_runner,
        region=question.options.resolved_region,
        runner_reason=runner_reason(question.options),
        launches=planned.launches,
        launch_us=question.launch_us,
        buckets=planned.buckets,
        engine=engine,
        estimates=estimates,
        room=_room(question, planned, estimates),
        notes=(*planned.notes, *(reason for words in CACHE_FORMATS if (reason := _why_not(config, words)))),
    )


def step_launches(graph: PartitionedGraph) -> StepLaunches:
    """What a replayed step launches: see `runtime/program/builder.py`, which writes it line by line."""
    pieces = [unit for unit in graph.units if unit.kind == "piece"]
    regions = [unit for unit in graph.units if unit.kind == "region"]
    slots = {slot.node for slot in graph.slots}
    roles = list(graph.roles.values())
    copied_in = roles.count(InputRole.COPIED_IN) + 2 * roles.count(InputRole.COPIED_OUT)
    kept = sum(node in slots for region in regions for node in region.outputs)
    inputs = {graph_input.node for graph_input in graph.traced.inputs}
    handed_out = sum(node in slots and node not in inputs for node in graph.output_assembly.inputs)
    return StepLaunches(
        by_hand=sum(len(region.nodes) for region in regions),
        graphs=len(pieces),
        copies=copied_in + kept + handed_out,
        captured_ops=sum(len(piece.nodes) for piece in pieces),
        duplicates=len(graph.duplicates),
    )


def estimate_capture(engine: EngineFigures, launches: StepLaunches, bucket: BucketMemory) -> BucketEstimate:
    """What capturing a token count would take, at the figures of an engine.

    Results that leave a piece count as the plan has them; those inside as much more as the engine took for its own.
    """
    more = max(engine.pool_factor - 1, 0) * bucket.inside
    return BucketEstimate(
        tokens=bucket.tokens,
        pool=round(bucket.temporaries + more),
        graphs=round(engine.bytes_an_op * launches.captured_ops),
        seconds=engine.seconds_an_op * launches.captured_ops,
    )


def _room(question: Question, planned: _Planned, estimates: Sequence[BucketEstimate]) -> DeviceRoom:
    parameters = planned.parameters if question.parameters is None else question.parameters
    weights = parameters * question.weights_dtype.itemsize
    workspace = max(bucket.workspace for bucket in planned.buckets)
    eager = max(bucket.eager for bucket in planned.buckets)
    captured = max(one.pool for one in estimates) + sum(one.graphs for one in estimates)
    left = question.gpu_memory - weights - planned.buffers - workspace - eager - captured
    return DeviceRoom(
        memory=question.gpu_memory,
        parameters=parameters,
        weights=weights,
        buffers=planned.buffers,
        workspace=workspace,
        eager=eager,
        captured=captured,
        left=left,
        caches=tuple(
            _cache_room(question, words, left) for words in CACHE_FORMATS if _why_not(question.config, words) is None
        ),
    )


def _why_not(config: DeepseekV4Config, words: tuple[str, str]) -> str | None:
    """Why a model has no caches of a format, or None."""
    try:
        config.with_cache_dtypes(*words)
    except UnsupportedConfigError as error:
        return str(error)
    return None


def _cache_room(question: Question, words: tuple[str, str], left: int) -> CacheRoom:
    config = question.config.with_cache_dtypes(*words)
    a_token = bytes_per_token(config, question.dtype)
    of_requests = bytes_of_requests(config, question.dtype, question.requests, max(question.tokens))
    block = config.compressed_block_size  # context comes in blocks of so many tokens
    blocks = int(max(left - of_requests, 0) / (a_token * block)) if a_token else None
    return CacheRoom(
        kv_cache_dtype=words[0],
        index_cache_dtype=words[1],
        bytes_a_token=a_token,
        of_requests=of_requests,
        tokens=None if blocks is None else blocks * block,
    )


def bytes_of_requests(config: DeepseekV4Config, dtype: torch.dtype, requests: int, tokens: int) -> int:
    """Bytes of windows and compressor states with which no step of so many tokens runs out, as a runner allocates."""
    limits = RunnerLimits(
        config=config,
        max_num_reqs=requests,
        max_num_batched_tokens=tokens,
        max_model_len=config.max_position_embeddings,
    )
    blocks = limits.count_blocks(block_groups(config), {})
    kinds = map(config.kind, range(config.num_hidden_layers))
    specs = [spec for kind in kinds for spec in layer_cache_specs(config, kind) if spec.group != "compressed"]
    return sum(blocks[spec.group] * spec.page_bytes(dtype) for spec in specs)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
