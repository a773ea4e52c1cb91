"""Systems: other people's runtimes on our workloads, to check against. Adapters only.

Those on torch.distributed run one process a rank, started by `rpbench`, or by torchrun on one host or several:

    torchrun --nproc-per-node 2 -m baselines.systems CASE.json
"""
