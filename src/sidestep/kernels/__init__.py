"""The step on the host in one pass over memory: native kernels, and which optimizers they speak for.

``kernels.h`` has the update, ``native.py`` calls it, ``rules.py`` says what it must be told for each optimizer, and
``reference.py`` is what it must compute.
"""
