"""Where curation runs: kernels over all splits, then statements over what the kernels wrote.

`tables` says what an engine can do, `choice` which one is taken and why, `duck` and `spark` are the two. The dataset's
digest is the same with either.
"""
