# One line a name, as `__init__.py` reads them.
# fmt: off
from mambackpt.engine import Request as Request
from mambackpt.engine import Run as Run
from mambackpt.engine import Settings as Settings
from mambackpt.engine import check_lockstep as check_lockstep
from mambackpt.engine import chunk_ends as chunk_ends
from mambackpt.engine import simulate as simulate
from mambackpt.errors import CheckpointError as CheckpointError
from mambackpt.errors import CheckpointTypeError as CheckpointTypeError
from mambackpt.errors import CheckpointValueError as CheckpointValueError
from mambackpt.exporter import MambaPrefillCheckpointExporter as MambaPrefillCheckpointExporter
from mambackpt.geometry import CacheGeometry as CacheGeometry
from mambackpt.metadata import NULL_BLOCK_ID as NULL_BLOCK_ID
from mambackpt.metadata import CacheConfig as CacheConfig
from mambackpt.metadata import CommonMetadata as CommonMetadata
from mambackpt.metadata import EngineConfig as EngineConfig
from mambackpt.metadata import KVCacheSpec as KVCacheSpec
from mambackpt.metadata import MambaPrefillCheckpointBuilder as MambaPrefillCheckpointBuilder
from mambackpt.metadata import MambaPrefillCheckpointMetadata as MambaPrefillCheckpointMetadata
from mambackpt.metadata import SpeculativeConfig as SpeculativeConfig
from mambackpt.models import PRESETS as PRESETS
from mambackpt.models import Capacity as Capacity
from mambackpt.models import HybridModel as HybridModel
from mambackpt.models import from_config as from_config
from mambackpt.models import mamba_block_size as mamba_block_size
from mambackpt.models import pool_capacity as pool_capacity
from mambackpt.models import read_boot_log as read_boot_log
from mambackpt.planner import Decision as Decision
from mambackpt.planner import Reason as Reason
from mambackpt.planner import compute_mamba_prefill_checkpoints as compute_mamba_prefill_checkpoints
from mambackpt.planner import explain as explain
from mambackpt.planner import get_mamba_prefill_checkpoint_position as get_mamba_prefill_checkpoint_position
from mambackpt.planner import is_mamba_prefill_checkpoint_valid as is_mamba_prefill_checkpoint_valid
from mambackpt.why import HitVerdict as HitVerdict
from mambackpt.why import explain_hit as explain_hit

__version__: str
