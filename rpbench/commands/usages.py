"""Usages of verbs, apart from their work: every start of the command line reads them, few need the rest.

The keys of each verb, for its help, stand in `usages.yaml`.
"""

# What `list` shows -> the folder of `conf/` that it is in; schedules are registered.
_GROUPS = (
    "schedule",
    "model",
    "cluster",
    "experiment",
    "gpu",
    "ssd",
    "workload",
    "cost",
    "backend",
    "optimizer",
    "mode",
)
LISTS = {f"{group}s": group for group in _GROUPS} | {"trackers": "tracker", "software": "software"}
NEW = "new model|cluster|gpu|schedule NAME"
ADVISE = (
    "advise model=CONFIG.json|NAME|ORG/NAME [seq_len=N] [batch=N] [schedules=A,B] [late=yes] "
    "[runs_in=FRAMEWORK] [seconds=N] [ssd=NAME] "
    "[finetune=full|lora|qlora lora_rank=N lora_targets=A,B] "
    "gpu=NAME num_devices=N [devices_per_node=N intra_bytes_per_s= inter_bytes_per_s= host_link_bytes_per_s= "
    "device_memory_bytes= host_memory_bytes= host_bytes_per_s=] | cluster=NAME|FILE [num_devices=N] [--json] [--open] "
    "[compare=A,B | max_seq_len=yes | batch=max | fewest_devices=yes | deadline_days=D tokens=N "
    "[usd_per_device_hour=]]"
)
