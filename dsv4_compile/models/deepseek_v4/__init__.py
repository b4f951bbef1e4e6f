"""DeepSeek V4 attention as a traced model: explicit step state in, custom ops inside, paged caches bound by address."""

from .attention import DeepseekV4Attention as DeepseekV4Attention
from .attention import InputProjections as InputProjections
from .bind_caches import bind_caches as bind_caches
from .caches import CacheGroup as CacheGroup
from .caches import CacheSpec as CacheSpec
from .caches import LayerCaches as LayerCaches
from .caches import allocate_caches as allocate_caches
from .caches import bytes_per_token as bytes_per_token
from .caches import cache_bytes as cache_bytes
from .caches import layer_cache_specs as layer_cache_specs
from .compressor import Compressor as Compressor
from .config import DeepseekV4Config as DeepseekV4Config
from .config import LayerKind as LayerKind
from .indexer import Indexer as Indexer
from .mtp import MTPBlock as MTPBlock
from .norm import RMSNorm as RMSNorm
from .rope import RotaryTable as RotaryTable
from .rope import build_cos_sin as build_cos_sin
from .rope_parameters import LinearScaling as LinearScaling
from .rope_parameters import RopeScaling as RopeScaling
from .rope_parameters import YarnScaling as YarnScaling
from .shared import SharedBuffers as SharedBuffers
from .shared import TopkIndices as TopkIndices
from .stack import AttentionStack as AttentionStack
from .stack import randomise_ as randomise_
from .step import StepState as StepState
