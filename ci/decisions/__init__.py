"""What planner and masks decide, computed by the host code without a GPU."""
