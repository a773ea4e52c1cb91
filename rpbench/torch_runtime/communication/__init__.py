"""Communication of lowered tables: whether the messages of all ranks can pass each other, and how long that takes.

tokens          rows as torch's runtime reads them, messages and waits included
faults          actions at which the runtime raises, whatever the other ranks do
channels        the messages of a table and the queues they stand in
execution       how far each rank comes, and when
verdict         alive or dead, with the smallest cycle of ranks that wait for each other
settings        a compute-only table lowered under the five settings of torch 2.15
send_budget     the fifth of them: waits moved forward until few enough sends are under way
waits           the ends of sends and reductions, which torch 2.15 wants written down
levels          what a row keeps at its fullest: sends, receive buffers, gathered stages
"""
