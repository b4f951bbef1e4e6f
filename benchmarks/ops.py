"""The ops one by one, at the sizes of the released models: how long a kernel takes beside what the device allows.

    python -m benchmarks.ops            minutes on a GPU; without one, as long as compiling the kernels takes
    python -m benchmarks.ops --quick    one small case of each op and cache format

On a GPU each op is timed with its kernel and in plain torch, and stands beside its roofline. Without one nothing is
timed: the rooflines are printed, and, with Triton, what each choice of the table compiles to.

A roofline is the longer of two times: all bytes that have to be read and written once, at the memory's rate, and all
products of matrices, at the rate of the tensor cores. What is re-read from caches, and launching, are not in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from dsv4_compile.inspect.arguments import OneLineParser
from dsv4_compile.ops.cache_formats import PLAIN
from dsv4_compile.ops.kernels.serve import NO_TRITON

from .kernel_cases import (
    CONTEXTS,
    DECODE_TOKENS,
    MODELS,
    OPS,
    PREFILL_TOKENS,
    VARIANTS,
    Case,
    entry_bytes,
    in_all_formats,
)
from .measure import measure
from .sections import Section, Setting, Table

# what the H200 is sold with: bytes and bf16 operations a second
MEMORY_RATE = 4.8e12
MATRIX_RATE = 989e12
COLUMNS = ("op", "model", "variant", "format", "tokens", "context", "MB", "GFLOP", "roofline us")
# how many times the roofline the matrix kernels may take, with plain rows and with packed ones
AIMED_AT = ("forward_mqa", "sparse_indexer")
AIM, PACKED_AIM = 2, 3
QUICK_CONTEXTS, QUICK_TOKENS = (1024,), (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a call cannot do without.

    Attributes:
        read: bytes read and written.
        products: operations of matrix products.
    """

    read: float
    products: float

    @property
    def seconds(self) -> float:
        """The roofline."""
        return max(self.read / MEMORY_RATE, self.products / MATRIX_RATE)


def cases(quick: bool) -> Iterator[Case]:
    """Decode of several sizes, and a prefill, at each context that an op's work depends on, in each cache format."""
    for op in OPS:
        for model, config in MODELS.items():
            for variant in VARIANTS.get(op, ("C4A",)):
                for context in QUICK_CONTEXTS if quick else CONTEXTS:
                    if context != CONTEXTS[0] and not depends_on_context(op, variant):
                        continue
                    for tokens in QUICK_TOKENS if quick else (*DECODE_TOKENS, PREFILL_TOKENS):
                        if tokens > context:
                            continue
                        heads = config.num_attention_heads
                        case = Case(op=op, model=model, variant=variant, tokens=tokens, context=context, heads=heads)
                        yield from in_all_formats(case)


def aim_of(case: Case) -> int | None:
    """How many times its roofline a case may take; None: nothing is said of it."""
    if case.op not in AIMED_AT:
        return None
    return AIM if case.cache_format == PLAIN else PACKED_AIM


def depends_on_context(op: str, variant: str) -> bool:
    """Whether a longer context is more work."""
    return op == "sparse_indexer" or (op, variant) in {("forward_mqa", "C4A"), ("forward_mqa", "C128A")}


def work_of(case: Case) -> Work:
    """The least work of a call: keys of tokens of one request are read once."""
    config = MODELS[case.model]
    arguments = case.arguments("meta")
    rows = sum(_bytes(value) for name, value in arguments.items() if name not in CACHES)
    if case.op == "forward_mqa":
        keys = attended_keys(case)
        shared = min(keys, case.context) if case.is_prefill else keys * case.tokens
        products = 4 * case.tokens * case.heads * keys * config.head_dim
        return Work(read=rows + shared * entry_bytes(case), products=products)
    if case.op == "sparse_indexer":
        entries = case.context // 4
        if entries <= config.index_topk:
            return Work(read=_bytes(arguments["topk_indices"]), products=0)  # nothing is scored
        read = rows + entries * entry_bytes(case) * (1 if case.is_prefill else case.tokens)
        return Work(read=read, products=2 * case.tokens * config.index_n_heads * entries * config.index_head_dim)
    return Work(read=rows + written_rows(case), products=0)


CACHES = ("swa_cache", "kv_cache", "k_cache", "state_cache", "cos_sin", "swa_block_table", "block_table", "ape")


def attended_keys(case: Case) -> int:
    """Keys of a token at the end of the context."""
    config = MODELS[case.model]
    compressed = {"SWA": 0, "C4A": min(case.context // 4, config.index_topk), "C128A": case.context // 128}
    return min(case.context, config.sliding_window) + compressed[case.variant]


def written_rows(case: Case) -> float:
    """Bytes that an insert writes to caches, and reads of compressor states."""
    config = MODELS[case.model]
    if case.op == "qnorm_rope_kv_insert":
        return case.tokens * entry_bytes(case)
    if case.op != "compress_kv_insert":
        return 0
    width = config.index_head_dim if case.variant == "indexer" else config.head_dim
    ratio, overlap = (128, 1) if case.variant == "C128A" else (4, 2)
    closing = case.tokens // ratio if case.is_prefill else case.tokens  # the last token of a request closes a block
    return 8 * case.tokens * overlap * width + closing * (8 * overlap * ratio * width + entry_bytes(case))


def _bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def run(setting: Setting) -> Section:
    """Times beside rooflines on a GPU; rooflines and builds without one."""
    if setting.device == "cpu":
        return Section(title="Ops", parts=(NOTHING_TIMED, rooflines(setting), *builds(setting)))
    return Section(title="Ops", parts=(RATES, timed(setting)))


RATES = f"""Rooflines are those of an H200 ({MEMORY_RATE / 1e12} TB/s, {MATRIX_RATE / 1e12:.0f} TFLOP/s of bf16 without
sparsity, its data sheet). Attention and the indexer are to take at most {AIM} times the roofline with bf16 caches, and
{PACKED_AIM} times with packed ones."""
NOTHING_TIMED = f"There is no GPU here: **nothing was timed**, and no kernel ran. {RATES}"


def rooflines(setting: Setting) -> Table:
    """The roofline of every case."""
    return Table(COLUMNS, tuple((*_name(case), *_work(work_of(case))) for case in cases(setting.quick)))


def timed(setting: Setting) -> Table:
    """Times of each case with its kernel and in plain torch, beside the roofline."""
    columns = (*COLUMNS, "us", "of roofline", "of torch")
    rows = []
    for case in cases(setting.quick):
        work = work_of(case)
        seconds = time_case(case, 0.05 if setting.quick else 0.5)
        ratios = f"{seconds['kernel'] / work.seconds:.1f}", f"{seconds['kernel'] / seconds['torch']:.2f}"
        rows.append((*_name(case), *_work(work), f"{seconds['kernel'] * 1e6:.1f}", *ratios))
        torch.cuda.empty_cache()
    return Table(columns, tuple(rows))


def time_case(case: Case, seconds: float) -> dict[str, float]:
    """Seconds of a call with the kernels and with the op in torch."""
    arguments = case.arguments("cuda")
    op = getattr(torch.ops.dsv4, case.op).default
    in_torch = getattr(importlib.import_module(f"dsv4_compile.ops.{case.op}"), case.op)
    steps = {"kernel": lambda: op(**arguments), "torch": lambda: in_torch(**arguments)}
    return measure(steps, seconds, "cuda", rounds=3)


def builds(setting: Setting) -> tuple[str | Table, ...]:
    """What the launches of each case compile to, if Triton is here."""
    if find_spec("triton") is None:
        return (f"What kernels compile to is not shown: {NO_TRITON}.",)
    from .kernel_builds import LEGEND, build_all, table_of
    from .kernel_cases import compiled_cases

    architectures = ("sm_90",) if setting.quick else ("sm_90", "sm_100", "gfx942")
    chosen = [case for case in compiled_cases() if not setting.quick or case.op == "inverse_rope"]
    return f"What each choice of the table compiles to, without a GPU. {LEGEND}", table_of(
        build_all(chosen, architectures)
    )


def _name(case: Case) -> tuple[str, ...]:
    variant = case.variant if case.op in VARIANTS else "-"
    return case.op, case.model, variant, case.cache_format, str(case.tokens), str(case.context)


def _work(work: Work) -> tuple[str, ...]:
    return f"{work.read / 1e6:.2f}", f"{work.products / 1e9:.2f}", f"{work.seconds * 1e6:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found."""
    parser = OneLineParser(prog="python -m benchmarks.ops", description="Time the ops, or say what is known without.")
    parser.add_argument("--quick", action="store_true", help="one small case of each op")
    options = parser.parse_args(arguments)
    print(run(Setting(quick=options.quick, device="cuda" if torch.cuda.is_available() else "cpu")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
