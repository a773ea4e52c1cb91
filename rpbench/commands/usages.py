"""Usages of verbs and their keys, apart from their work: every start of the command line reads them, few need the rest.

A key stands with its default, or with what it takes where it has none.
"""

from collections.abc import Mapping

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

WIDEST = 22  # letters of a key that its meaning stands beside
_RESULTS = {"results_dir=results": "the folder of the records"}
# Verbs that take the settings of a run as well, those of `conf/config.yaml`.
OF_A_RUN = ("run", "show", "plan", "profile", "check-order")
KEYS: Mapping[str, Mapping[str, str]] = {
    "run": {
        "-m": "every combination of key=a,b; launched here, by joblib or by SLURM (docs/howto/launchers.md)",
        "--json": "records on stdout on a terminal too",
        "--cfg job": "print the configuration that the words compose, and run nothing",
    },
    "advise": {
        "model=NAME": "a name of `rpbench list models`, a config.json or its folder, or ORG/NAME in the local cache",
        "num_layers= hidden= heads= vocab=": "a model by its sizes; also key_value_heads= inner= experts.total= ...",
        "seq_len=2048": "tokens of a sequence; fewer where the model has positions for fewer",
        "batch=8 x devices": "sequences of a step; max asks for the largest",
        "lengths=FILE": "tokens of each sequence of a step, where they differ",
        "finetune=full": "full, lora or qlora",
        "lora_rank=16": "of adapters",
        "lora_targets=A,B": "the matrices that have adapters; none given: all of a layer",
        "frozen_layers=0": "layers from the first that do not learn",
        "optimizer_bits=32": "of the optimizer's state: 32 or 8",
        "gpu=NAME": "a name of `rpbench list gpus`, or as people say it: H100, RTX 4090",
        "num_devices=N": "how many there are; of a cluster all where none are named",
        "devices_per_node=N": "all where such devices usually stand so many in a host, else 8",
        "cluster=NAME": "instead of gpu=: a name of `rpbench list clusters`, or a file",
        "device_memory_bytes= host_memory_bytes=": "of a device, and of the host; none given: as the data sheet says",
        "intra_bytes_per_s= inter_bytes_per_s=": "links between devices of a host, and between hosts, one way",
        "host_link_bytes_per_s= host_bytes_per_s=": "the link from host to device, and the host's memory",
        "ssd=NAME": "SSDs of the host (conf/ssd/); none given: methods that need them take no part",
        "schedules=A,B": "who takes part; none given: all",
        "runs_in=FRAMEWORK": "only what runs there today: torchtitan, Megatron, DeepSpeed, FSDP2, RoundPipe's library",
        "late=no": "yes: methods whose gradients are of older weights join the ranking",
        "seconds=10": "of each processor, for the searches on one host",
        "compare=A,B": "two contenders beside each other, by causes",
        "max_seq_len=no": "yes: the longest sequence of each",
        "fewest_devices=no": "yes: the fewest devices that hold it",
        "deadline_days=D tokens=N": "the cheapest rent of those in time",
        "usd_per_device_hour=": "the rent; none given: that of the machine's file, where it has one",
        "--open": "a page on which microbatch, recomputation and devices can be turned",
        "--json": "the whole answer on stdout on a terminal too",
    },
    "show": {
        "format=text": "or torch_csv, torchtitan, megatron_layout, deepspeed, fsdp2, roundpipe, ...; export= too",
        "draw=FILE": "a drawing of its timeline: svg, pdf or png",
        "check=communication": "whether its messages pass each other; exit status 1 where they do not",
    },
    "plan": {
        "mesh=search": "meshes instead, with the words of `advise`",
        "plan=pipedream": "stages and replicas of a profile, with the keys below",
        "profile=FILE edges=FILE": "its nodes and edges, as `profile` writes them",
        "num_machines=N machines_per_level=[N,M]": "either, innermost first",
        "bandwidth_bytes_per_s=[B]": "of each level",
        "memory_bytes=B": "of a machine; none given: no limit",
        "count_p2p=false": "whether tensors between stages take time",
        "straight=false": "whether stages may have no replicas",
        "use_fewer_machines=false": "whether machines may stay idle",
    },
    "profile": {
        "out=PREFIX": "PREFIX_nodes.csv and PREFIX_edges.csv; none given: results/profiles/MODEL",
        "num_runs=10": "of each measurement",
    },
    "calibrate": {
        "name=this_machine": "of the cluster file, for cluster=",
        "out=FOLDER": "where it is written; none given: where cluster= looks",
        "device=cpu": "or accelerator",
        "num_devices=N": "cores that work at the same time; none given: all of this process",
        "ranks=N": "processes between which collectives are measured; none given: none are",
        "dry=N": "so many accelerators are made up and the order of their streams is checked; nothing is written",
    },
    "check-order": {
        "accelerators=1": "that the devices share",
        "mutants=no": "yes: every wait is dropped, delayed and misplaced in turn, and those that are seen are counted",
    },
    "compare": _RESULTS,
    "export": {
        "format=csv": "or jsonl, latex, parquet",
        "columns=A,B": "which, in this order; none given: all",
        "out=FILE": "none given: stdout",
        **_RESULTS,
    },
    "query": _RESULTS,
    "pivot": {
        "rows=model": "the key of the rows",
        "columns=schedule": "the key of the columns",
        "value=tokens_per_s": "the metric",
        "baseline=NAME": "a column that the others are divided by; none given: none is",
        "format=terminal": "or csv, latex, html",
        "out=FILE": "none given: stdout",
        **_RESULTS,
    },
    "compact": _RESULTS,
    "list": {"--json": "a JSON object a line, on a terminal too"},
    "import": {"out=FILE": "of kineto: the timeline; none given: beside the file", **_RESULTS},
    "explain": {
        "metric=pace": "or tflops, mfu",
        "table=NAME:ROW": "in place of a run: a row of a published table",
        "tokens_per_s=N": "in place of B: a number of a run that is like A but for the keys beside it",
        **_RESULTS,
    },
    "report": {"out=report.html": "the page", **_RESULTS},
    "dashboard": {
        "port=0": "on loopback; 0: any that is free",
        "project=rpbench": "of W&B",
        "entity=NAME": "of W&B; none given: your own",
        "--dry-run": "print what W&B would get",
        **_RESULTS,
    },
}
