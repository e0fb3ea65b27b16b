from paceline.ops.selector.ref import candidate_scores

__all__ = ["candidate_scores"]
