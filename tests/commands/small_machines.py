"""Words that ask `advise` about small models on small machines: four and two cards, and nodes of four."""

TWO_CARDS = ("num_layers=4", "hidden=512", "heads=8", "vocab=8000", "seq_len=512", "gpu=rtx4090", "num_devices=2")
EIGHT_LAYERS = ("num_layers=8", "hidden=1024", "heads=8", "vocab=32000")
NODES = ("gpu=h100_sxm5_80gb", "num_devices=8", "devices_per_node=4", "batch=16", "seq_len=1024")
FOUR_L40S = ("gpu=l40s", "num_devices=4", "host_link_bytes_per_s=32e9")
SMALL = ("num_layers=4", "hidden=512", "heads=8", "vocab=8000", "seq_len=512", "schedules=1f1b,gpipe")
TWO_L40S = ("gpu=l40s", "num_devices=2")
