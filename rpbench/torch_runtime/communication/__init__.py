"""Communication of lowered tables: whether the messages of all ranks can pass each other, and how long that takes.

tokens          rows as torch's runtime reads them, messages and waits included
execution       messages and their queues; how far each rank comes, when, and what it keeps; where the runtime raises
verdict         alive or dead, with the smallest cycle of ranks that wait for each other
settings        a compute-only table lowered under the five settings of torch 2.15, with the waits it wants written down
"""
