"""Schedules and plans in the forms of other programs: torch's CSV and tables, torchtitan, Megatron, DeepSpeed."""
