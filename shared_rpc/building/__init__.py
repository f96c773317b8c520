"""A user's own model around tensors that are there already."""

from shared_rpc.building.materializing import materialize

__all__ = ["materialize"]
