from paceline.ops.dispatch import by_device
from paceline.ops.gdn import ref
from paceline.ops.gdn.ref import CHUNK_PLAN, GdnInputs, ReplayLog, chunk_facts

gdn_inputs = by_device(ref.gdn_inputs, "paceline.ops.gdn.kernel")
gdn_verify = by_device(ref.gdn_verify, "paceline.ops.gdn.kernel")
gdn_replay = by_device(ref.gdn_replay, "paceline.ops.gdn.kernel")
gdn_prefill = by_device(ref.gdn_prefill, "paceline.ops.gdn.kernel")

__all__ = ["CHUNK_PLAN", "GdnInputs", "ReplayLog", "chunk_facts", "gdn_inputs", "gdn_prefill", "gdn_replay", "gdn_verify"]
