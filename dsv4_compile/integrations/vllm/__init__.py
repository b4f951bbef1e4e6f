"""This backend inside of vLLM: a plugin that vLLM finds by itself, and that does nothing unless it is asked for.

    vllm serve MODEL --additional-config '{"dsv4_compile": {"region": "narrow"}}'

The options are those of `torch.compile(options=)`, and those of `options.VllmOptions`. docs/vllm.md has what each mode
of vLLM does, and what is refused.

| file | subject |
|---|---|
| `plugin` | the two functions of vLLM that are wrapped, and when |
| `options` | what `--additional-config` asks for |
| `checks` | what is refused before a model is loaded, and why |
| `roles` | which ops of vLLM reach what belongs to the step |
| `vllm_backend` | what compiles a graph that vLLM's Dynamo has traced |
| `step_metadata` | the tensors that an op reaches through the forward context |
| `padding` | padding and capture ahead where vLLM leaves both out |
| `wrapping` | how a method of vLLM is wrapped, once |

Where plugins are switched off, modes 1 and 2 can name the backend themselves:

    vllm serve MODEL -cc '{"mode": 2, "backend": "dsv4_compile.integrations.vllm.backend"}'

vLLM looks that name up while it makes the model, and calls it in the first forward, where no configuration is at hand
any more. So it is made when it is looked up.
"""

from __future__ import annotations

from .plugin import plugin as plugin


def __getattr__(name: str) -> object:
    if name == "backend":
        from .plugin import backend_of_current_config

        return backend_of_current_config()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
