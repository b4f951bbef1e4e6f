"""Two small model runners: paged caches, chunked prefill, continuous batching, drafts, greedy or seeded sampling.

Any callable `model(input_ids [T], positions [T], step) -> logits [T, vocab]` can be run. The two runners differ in
how the step-state tensors reach the model, and so in what may be captured of it.
"""

from .drafting import DraftCounts as DraftCounts
from .limits import RunnerLimits as RunnerLimits
from .model_runner import ModelRunner as ModelRunner
from .model_runner import ModelRunnerV1 as ModelRunnerV1
from .model_runner import ModelRunnerV2 as ModelRunnerV2
from .model_runner import StepResult as StepResult
from .sampling import Sampling as Sampling
from .step_inputs import ModelInputs as ModelInputs
