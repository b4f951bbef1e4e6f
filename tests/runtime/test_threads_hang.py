"""Threads that wait for each other, in a process of their own, where a hang can be ended.

Nobody waits unless there is a hang, so the limits are long: a busy machine is none.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from repository import SUPPORT

MUTUAL = """
    import threading
    import torch
    from case_helpers import rows
    from hooks import HOOK, hooked, set_hook
    from runtime_helpers import compile_host

    first, second = (compile_host(lambda x, k=k: hooked(x) * k, **HOOK) for k in (2, 3))
    with torch.no_grad():
        for _ in range(3):
            first(rows(5)), second(rows(5))
    inside = threading.Barrier(2)
    own = threading.local()

    def hook(q):
        if getattr(own, "inner", None) is None:
            return 2 * q
        inner, own.inner = own.inner, None
        inside.wait(100)
        with torch.no_grad():
            return inner(q)

    def run(outer, inner):
        own.inner = inner
        with torch.no_grad():
            outer(rows(5))

    set_hook(hook)
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    print("hang" if any(thread.is_alive() for thread in threads) else "done")
"""

POOL = """
    from concurrent.futures import ThreadPoolExecutor
    import os
    import threading
    import torch
    from case_helpers import rows
    from hooks import HOOK, expected, hooked, set_hook
    from runtime_helpers import compile_host

    compiled = compile_host(hooked, **HOOK)
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(5))
    pool = ThreadPoolExecutor(1)

    def run(q):
        with torch.no_grad():
            compiled(q)

    def hook(q):
        set_hook(lambda q: 2 * q)
        pool.submit(run, rows(5)).result(100)
        return 2 * q

    set_hook(hook)
    x = rows(5)
    try:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected(x))
        print("done", flush=True)
    except TimeoutError:
        print("hang", flush=True)
    os._exit(0)  # the worker may hang
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [MUTUAL, POOL], ids=["mutual calls", "worker thread"])
def test_threads_that_wait_for_each_other_do_not_hang(script: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr
