"""Triton kernels of the `dsv4` ops, one op a file; `serve.py` decides when they run, `table.py` in which shape.

A kernel file imports Triton and is itself imported by the first call on a GPU. It reads in one order: what runs on the
device, then a record of the arguments of a call, with `why_not`, the reason why no kernel can serve it (the torch op
does then), and `launches`, what it launches. Launches are records, so that what is checked without a GPU is what would
be launched with one.

Every launch keeps to the rules of captured graphs: its grid depends on shapes alone, whatever a step decides is read on
the device, scratch comes from the caller or from torch's allocator, nothing is tuned at run time, and what a
specialisation depends on is the same for all calls of a bucket.
"""
