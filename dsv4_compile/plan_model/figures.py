"""What is said of a model: frozen records of numbers and words, made by `make`, shown by `text` and the page.

Launches, memory and bytes a token follow from the plan alone, and two machines print the same. Estimates rest on what
one engine has shown in the same run (`EngineFigures`), and differ from machine to machine.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaunches:
    """What the host launches in a replayed step; the token count does not change it.

    Attributes:
        by_hand: eager ops, of which each is one launch or more.
        graphs: captured pieces, of which each is one graph launch.
        copies: inputs that are copied in and out, results of eager ops that are copied to their slots, and the copies
            of outputs that the caller gets.
        captured_ops: ops in the pieces, which a graph launches.
        duplicates: pieces that are the same as an earlier one up to their weights.
    """

    by_hand: int
    graphs: int
    copies: int
    captured_ops: int
    duplicates: int

    @property
    def total(self) -> int:
        """All that the host gives to the device one by one."""
        return self.by_hand + self.graphs + self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMemory:
    """Bytes of a captured token count, as planned.

    Attributes:
        tokens: of the step.
        workspace: the arena.
        lower_bound: the most that is alive in it at once.
        unshared: what it would be if no two values shared memory.
        outputs: of it, what the caller gets: logits of every token.
        eager: the most that eager ops of one region allocate at once, outside of the workspace, with scratch of Triton
            kernels.
        temporaries: the most that results of one piece take at once.
        inside: of these, those that stay inside of a piece.
    """

    tokens: int
    workspace: int
    lower_bound: int
    unshared: int
    outputs: int
    eager: int
    temporaries: int
    inside: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What captures of a tiny stack took on an engine.

    Attributes:
        engine: its name.
        pieces, ops: how many were captured, and the ops in them.
        seconds_an_op: time of a capture, for each op in it.
        bytes_an_op: what a captured graph keeps beside its pool, for each op in it.
        pool_factor: bytes of the pool, for each byte of results inside of a piece that the plan knows of.
    """

    engine: str
    pieces: int
    ops: int
    seconds_an_op: float
    bytes_an_op: float
    pool_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEstimate:
    """What capturing one token count would take, from `EngineFigures`.

    Attributes:
        tokens: of the step.
        pool: bytes for temporaries, which all token counts share.
        graphs: bytes that captured graphs keep beside it, for this token count alone.
        seconds: time of the capture.
    """

    tokens: int
    pool: int
    graphs: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """The caches of one format on the GPU that was asked about.

    Attributes:
        kv_cache_dtype, index_cache_dtype: the format.
        bytes_a_token: what each further token of a long request takes.
        of_requests: bytes of windows and compressor states, which do not grow with the context.
        tokens: of context that fit into what is left, in all requests together; 0 if nothing is left, None if context
            takes no memory, as in a model of sliding windows alone.
    """

    kv_cache_dtype: str
    index_cache_dtype: str
    bytes_a_token: float
    of_requests: int
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """What a GPU holds beside the caches, in bytes, and how much context fits then.

    Attributes:
        memory: of the GPU.
        parameters: how many there are.
        weights: they, in their dtype.
        buffers: RoPE tables and the selected block ids.
        workspace: the arena of the largest token count.
        eager: what eager ops allocate at most.
        captured: estimated: the pool of the largest, and the graphs of all token counts.
        left: what remains; negative if that much is missing.
        caches: by format.
    """

    memory: int
    parameters: int
    weights: int
    buffers: int
    workspace: int
    eager: int
    captured: int
    left: int
    caches: tuple[CacheRoom, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """All that is said of a model.

    Attributes:
        model: "flash", "pro" or the path of a configuration.
        layers: attention layers.
        parameters: of the attention stack: attention, embedding and head, without experts.
        dtype: of weights and activations in the plan.
        weights_dtype: in which the weights are counted.
        requests: that run at once.
        runner, region: as the plan has them.
        runner_reason: why that runner.
        launches: of a step.
        launch_us: what one costs the host, in microseconds, as it was given.
        buckets: memory by token count, as planned.
        engine: what the estimates rest on.
        estimates: by token count.
        room: on the GPU that was asked about.
        notes: of the plan.
    """

    model: str
    layers: int
    parameters: int
    dtype: str
    weights_dtype: str
    requests: int
    runner: str
    region: str
    runner_reason: str
    launches: StepLaunches
    launch_us: float
    buckets: tuple[BucketMemory, ...]
    engine: EngineFigures
    estimates: tuple[BucketEstimate, ...]
    room: DeviceRoom
    notes: tuple[str, ...]

    @property
    def step_us(self) -> float:
        """Host time of a step, in microseconds."""
        return self.launches.total * self.launch_us

    def to_json(self) -> str:
        """The same for programs, keys as the attributes here, and what follows from them."""
        fields = dataclasses.asdict(self)
        fields["launches"]["total"] = self.launches.total
        return json.dumps({**fields, "step_us": self.step_us}, indent=2)
