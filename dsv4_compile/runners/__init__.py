"""Two small model runners: paged caches, chunked prefill, continuous batching, greedy sampling.

Any callable `model(input_ids [T], positions [T], step) -> logits [T, vocab]` can be run. The two runners differ in
how the step-state tensors reach the model, and so in what may be captured of it.
"""

from .limits import RunnerLimits as RunnerLimits
from .model_runner import ModelRunner as ModelRunner
from .model_runner import ModelRunnerV1 as ModelRunnerV1
from .model_runner import ModelRunnerV2 as ModelRunnerV2
from .model_runner import StepResult as StepResult
from .step_inputs import ModelInputs as ModelInputs
