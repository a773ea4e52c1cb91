"""A fuzzer on every reader of what strangers wrote: `python -m tests.fuzzing --minutes 60 --seed 1`.

It takes documents that the program itself has written, bends them, and reads them as a user would. A read may give a
value that its own checks hold for, or a `ValueError` that our code raised in words that name the file. Anything else is
a finding: another exception, more than a gigabyte, seconds without an end, a damaged record taken for a sound one, a
file touched that lies elsewhere, a secret of the environment in what is said.
"""
