"""One process that serves a few prompts with vLLM on a CPU: `python vllm_serving.py MODEL_FOLDER ARGUMENTS_AS_JSON`.

The last line that it prints is JSON: the tokens of each prompt, what the counters were once vLLM was ready, and what
they grew by while the prompts were served a second time.

With "graphs" among the arguments the platform says that it has graphs, as that of GPUs does: mode 3 stays mode 3, and
vLLM's own loop runs each capture size once to warm up and once to capture.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)
LENGTHS = (3, 7, 12, 1, 20, 33, 90, 5)
NEW_TOKENS = 8
SIZES = [1, 2, 4, 8, 16, 32, 64]


def pretend_graphs() -> None:
    """Let the CPU's platform keep what was asked for, and its worker capture as that of a GPU does."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    check = CpuPlatform.check_and_update_config.__func__
    warm_up = CPUWorker.compile_or_warm_up_model

    def keep(cls, config) -> None:
        compilation = config.compilation_config
        names = ("mode", "cudagraph_mode", "cudagraph_capture_sizes", "backend")
        before = {name: getattr(compilation, name) for name in names}
        check(cls, config)
        for name, value in before.items():
            setattr(compilation, name, value)

    def warm_up_and_capture(self):
        times = warm_up(self)
        runner = self.model_runner
        for mode, descriptors in runner.cudagraph_dispatcher.get_capture_descs():
            runner._capture_cudagraphs(batch_descriptors=descriptors, cudagraph_runtime_mode=mode)
        return times

    CpuPlatform.check_and_update_config = classmethod(keep)
    CpuPlatform.support_static_graph_mode = classmethod(lambda cls: True)
    CPUWorker.compile_or_warm_up_model = warm_up_and_capture


def main(folder: str, given: str) -> None:
    """Serve, and print what came of it."""
    import torch
    from vllm import LLM, SamplingParams

    import dsv4_compile

    torch.set_num_threads(1)
    arguments = json.loads(given)
    if arguments.pop("graphs", False):
        pretend_graphs()
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        seed=0,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **arguments,
    )
    counters = dsv4_compile.counters
    ready = counters.snapshot()
    generator = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(3, 512, (n,), generator=generator).tolist()} for n in LENGTHS]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    rounds, grown = [], {}
    for _ in range(2):
        before = counters.snapshot()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append([list(output.outputs[0].token_ids) for output in outputs])
        grown = {name: value - before[name] for name, value in counters.snapshot().items() if value != before[name]}
    mode = int(llm.llm_engine.vllm_config.compilation_config.mode)
    print(json.dumps({"rounds": rounds, "ready": dict(ready), "served": grown, "mode": mode}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
