"""`dist-check`: tests all-reduce between processes, GPUs and machines: its results, speed and network path.

`cli` reads the options, and `where` the position of this process in the job (options, torchrun, Slurm, Indexed Job).
Each machine runs one `member`. The members connect to the `meeting` of the first one, which reports a
missing member or a difference before a framework hangs. `plan` chooses ranks and library from the members'
facts (`machine`). Each member then starts a process for each of its ranks (`ranks`), which computes (`rank`) with the
framework's module in `dist_check_backends`. `judge` creates the report, with the advice of `advice`, and `show` prints
it.
"""
