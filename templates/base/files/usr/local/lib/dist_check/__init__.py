"""`dist-check`: all-reduce between processes, GPUs and machines; is it right, how fast, by which way, and what to fix.

The way through: `cli` reads what is asked, `where` finds out who is who (options, torchrun, Slurm, Indexed Job). Each
machine runs one `member`. The members meet at the first one's `meeting`, by a connection of our own: so it can say who
did not come, and what differs, before a framework waits in silence. `plan` decides ranks and library from what the
members tell (`machine`). Each member then starts a process for each of its ranks (`ranks`), which computes (`rank`)
with the framework's part in `dist_check_backends`. `judge` makes one report of everything, with the advice of `advice`,
and `show` prints it.
"""
