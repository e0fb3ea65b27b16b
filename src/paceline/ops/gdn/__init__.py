from paceline.ops.gdn.ref import gdn_prefill, gdn_replay, gdn_verify

__all__ = ["gdn_prefill", "gdn_replay", "gdn_verify"]
