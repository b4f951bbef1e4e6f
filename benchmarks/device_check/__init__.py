"""What a GPU has to say, in one command of at most ten minutes, which has to work the first time.

    python -m benchmarks.device_check --out OUT            on a GPU
    python -m benchmarks.device_check --device cpu --dry   every section in tiny sizes, to see that it runs
    python -m benchmarks.device_check --render FILE        docs/hardware.md and README.md from a result.json

A machine with a GPU is lent for minutes. It may lack everything but torch, the checkout is not installed there, and one
illegal address makes a process useless for good. So:

- The parent (`parent`) imports neither torch nor anything that does. It reads the clock, and writes what it is told.
- Each section (`catalogue`) is a process with a process group and a time box of its own (`boxed`). At its end all of
  the group is killed, and whoever left the group too.
- A section writes rows as it measures them (`rows`), one line of JSON each, to a file that the parent reads: one that
  hangs or is killed keeps the rows that it had.
- `OUT/result.json` (`result`) is written anew, in one step, after each section and every few seconds within.
- An error within a section is a row with its traceback (`bench`), and the section goes on; what may break the device is
  in a process of its own.
- What is newer than the oldest torch, and every tool and library beside torch, is asked for before it is used.

Figures that are compared come from one process, taken in turns, and their steps do the same work beside what they
differ in: new step state is made in every step of a group of rows, or in none.
"""
