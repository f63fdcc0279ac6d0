"""What hid a ride, and what did not: from PyTorch's traces of one step to numbers and a picture.

    rank_trace.py   one rank's Chrome trace: what ran when, on which stream, for which layer; the traces of all ranks as
                    one file; unions and differences of spans of time
    numbers.py      how much of it was exposed; what profile.json says
    kinds.py        kernels by kind, of any model: where the time of a step went

`carpool.train.run.profile_run` records the traces, `carpool.report.profile_page` makes a page of the numbers. Nothing
here needs PyTorch.
"""
