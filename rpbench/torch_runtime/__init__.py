"""torch's own pipeline runtime: schedules written for it, read from it, and run on it, a process a rank.

`tables` says whether a table can hold a schedule; `torch_csv`, `frameworks` and `chrome` write and read what others
take, without torch; `lowering` adds the messages; `request`, `worker`, `ranks` and `outcome` are one run.
"""
