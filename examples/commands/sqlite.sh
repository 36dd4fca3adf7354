#!/bin/sh
# Writes 20,000 rows and reads them by an index, with Python's sqlite3; prints the seconds it took.
#     sh sqlite.sh PAGE_SIZE CACHE_SIZE JOURNAL_MODE
exec python3 - "$@" <<'PY'
import os, sqlite3, sys, tempfile, time
page, cache, journal = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    base = sqlite3.connect(os.path.join(folder, "base.db"), isolation_level=None)
    for name, value in (("page_size", page), ("cache_size", cache), ("journal_mode", journal)):
        base.execute(f"PRAGMA {name} = {value}")
    begin = time.perf_counter()
    base.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, word TEXT, number REAL)")
    for start in range(0, 20000, 100):
        base.execute("BEGIN")
        base.executemany("INSERT INTO t VALUES (?, ?, ?)", ((i, f"word {i * 7919 % 20000}", i / 3) for i in range(start, start + 100)))
        base.execute("COMMIT")
    base.execute("CREATE INDEX words ON t (word)")
    for i in range(20000):
        base.execute("SELECT number FROM t WHERE word = ?", (f"word {i * 31 % 20000}",)).fetchone()
    print(f"{time.perf_counter() - begin:.3f} s")
PY
