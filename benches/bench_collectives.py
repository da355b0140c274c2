"""Every collective beside Gloo, on 2 and on 4 ranks: the tables of the README."""

from tpu_dist.cli import main

SIZES = "8,1KiB,16KiB,64KiB,256KiB,1MiB,8MiB,64MiB"

for ranks, operations in (("2", "all"), ("4", "all_reduce,all_gather,reduce_scatter")):
    arguments = ["bench", "--ops", operations, "--sizes", SIZES, "--ranks", ranks]
    status = main([*arguments, "--compare", "gloo"])
    if status:
        raise SystemExit(status)
